"""What an emulator must be better than: the field before, and the mean of the month."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import LockstepError
from lockstep.recipes.ufs.fields.cells import at_cells, check_one_grid
from lockstep.recipes.ufs.fields.rows import Rows
from lockstep.recipes.ufs.fields.sources import Source
from lockstep.recipes.ufs.fields.times import Moment

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Baseline:
    """A prediction that needs no emulator.

    Attributes:
        values: predicted outputs of N rows in their units, [N, out]; NaN where it has none.
        remark: why it has none for some rows; empty if it has all.
    """

    values: Floats
    remark: str


@dataclass(frozen=True)
class Period:
    """Scenes with their times.

    Attributes:
        sources: the scenes.
        moments: time of each.
    """

    sources: Sequence[Source]
    moments: Sequence[Moment]


def persistence(rows: Rows, names: Sequence[str], period: Period) -> Baseline:
    """The values of each row's cell at the latest earlier time of the same files.

    Args:
        rows: N rows of the scenes.
        names: short names of the outputs.
        period: scenes that rows are of.

    Raises:
        DataError: a file is damaged, or has values that cannot be right.
    """
    values = np.full((len(rows), len(names)), np.nan)
    dated = [(m.date, number) for number, m in enumerate(period.moments) if m.date is not None]
    before = {b: a for (_, a), (_, b) in pairwise(sorted(dated))}
    for time in np.unique(rows.time):
        earlier = before.get(int(time))
        if earlier is not None:
            here = rows.time == time
            values[here] = at_cells(period.sources[earlier], names, rows.cell[here])
    return Baseline(values, _lacking(values, "no earlier time in these files has their cells"))


def climatology(
    rows: Rows, names: Sequence[str], period: Period, trained: Period | str
) -> Baseline:
    """The mean of each row's cell over the training period's fields of its calendar month.

    A field of the row's own time is left out of the mean, which would know the truth.

    Args:
        rows: N rows of the scenes of `period`.
        names: short names of the outputs.
        period: scenes that rows are of.
        trained: scenes that the emulator was trained on; or why they are not there.

    Raises:
        DataError: a file is damaged, or has values that cannot be right.
    """
    values = np.full((len(rows), len(names)), np.nan)
    if isinstance(trained, str):
        return Baseline(values, trained)
    try:
        check_one_grid(period.sources[0], trained.sources[0])
    except LockstepError as error:
        return Baseline(values, f"none is on this grid: {error}")
    by_month: dict[int, list[int]] = {}
    for time in np.unique(rows.time):
        month = period.moments[time].month
        if month is not None:
            by_month.setdefault(month, []).append(int(time))
    for month, times in by_month.items():
        here = np.isin(rows.time, times)
        cells, place = np.unique(rows.cell[here], return_inverse=True)
        keys = {period.moments[time].key for time in times}
        total, count, own = _month(trained, month, names, cells, keys)
        for time in times:
            mine = rows.time == time
            at = place[rows.time[here] == time]
            sums, counts = total[at], count[at]
            field = own.get(period.moments[time].key)
            if field is not None:
                there = np.isfinite(field[at])
                sums, counts = sums - np.where(there, field[at], 0), counts - there
            values[mine] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Baseline(values, _lacking(values, "no other field of the training is of their month"))


def _month(
    trained: Period,
    month: int,
    names: Sequence[str],
    cells: npt.NDArray[np.int64],
    keys: Collection[Any],
) -> tuple[Floats, Floats, Mapping[Any, Floats]]:
    """Sums and numbers [cells, names] over the fields of a month, and those of some times."""
    total, count = np.zeros((len(cells), len(names))), np.zeros((len(cells), len(names)))
    own = {}
    for source, moment in zip(trained.sources, trained.moments, strict=True):
        if moment.month == month:
            field = at_cells(source, names, cells)
            total += np.nan_to_num(field)
            count += np.isfinite(field)
            if moment.key in keys:
                own[moment.key] = field
    return total, count, own


def _lacking(values: Floats, why: str) -> str:
    lacking = int(np.isnan(values).any(1).sum())
    return f"{lacking:,} of {len(values):,} rows have none: {why}" if lacking else ""
