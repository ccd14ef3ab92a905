"""Skill by region and season: errors beside those of persistence and climatology."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import LockstepError
from lockstep.observe.figures import new_figure, save
from lockstep.systems.ufs.fields.grids import REGIONS
from lockstep.systems.ufs.fields.rows import Rows
from lockstep.systems.ufs.fields.scenes import Moment
from lockstep.systems.ufs.fields.sources import Source, at_cells, check_one_grid
from lockstep.systems.ufs.report.scores import inside

Floats = npt.NDArray[np.floating[Any]]

SEASONS: Mapping[str, tuple[int, ...]] = {
    "DJF": (12, 1, 2), "MAM": (3, 4, 5), "JJA": (6, 7, 8), "SON": (9, 10, 11)
}  # fmt: skip
"""Calendar months by season."""

ALL = "all"
"""The name of all seasons together."""


@dataclass(frozen=True)
class Baseline:
    """A prediction without an emulator.

    Attributes:
        values: predicted outputs of N rows in their units, [N, out]; NaN where there is none.
        remark: why some rows have none; empty if all have one.
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
        DataError: a file is damaged, or has implausible values.
    """
    values = np.full((len(rows), len(names)), np.nan)
    dated = [(m.date, number) for number, m in enumerate(period.moments) if m.date is not None]
    before = {b: a for (_, a), (_, b) in pairwise(sorted(dated))}
    for time in np.unique(rows.time):
        earlier = before.get(int(time))
        if earlier is not None:
            at_time = rows.time == time
            values[at_time] = at_cells(period.sources[earlier], names, rows.cell[at_time])
    return Baseline(values, _lacking(values, "no earlier time in these files has their cells"))


def climatology(
    rows: Rows, names: Sequence[str], period: Period, trained: Period | str
) -> Baseline:
    """The mean of each row's cell over the training period's fields of its calendar month.

    A field of the row's own time is left out, since the mean would contain the truth.

    Args:
        rows: N rows of the scenes of `period`.
        names: short names of the outputs.
        period: scenes that rows are of.
        trained: scenes that the emulator was trained on; or why they are not available.

    Raises:
        DataError: a file is damaged, or has implausible values.
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
        at_times = np.isin(rows.time, times)
        cells, place = np.unique(rows.cell[at_times], return_inverse=True)
        keys = {period.moments[time].key for time in times}
        total, count, own = _month(trained, month, names, cells, keys)
        for time in times:
            mine = rows.time == time
            at = place[rows.time[at_times] == time]
            sums, counts = total[at], count[at]
            field = own.get(period.moments[time].key)
            if field is not None:
                is_finite = np.isfinite(field[at])
                sums, counts = sums - np.where(is_finite, field[at], 0), counts - is_finite
            values[mine] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Baseline(values, _lacking(values, "no other field of the training is of their month"))


def _month(
    trained: Period,
    month: int,
    names: Sequence[str],
    cells: npt.NDArray[np.int64],
    keys: Collection[Any],
) -> tuple[Floats, Floats, Mapping[Any, Floats]]:
    """Sums and counts [cells, names] over the fields of a month, and the fields of some times."""
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


def skill(predicted: Floats, baseline: Floats, true: Floats) -> dict[str, Any] | None:
    """1 - RMSE / RMSE of the baseline, over the rows of the baseline; None if it has none.

    1 is perfect, 0 no better than the baseline, below 0 worse.

    Args:
        predicted: values by the emulator, [N].
        baseline: values by the baseline, [N], NaN where there is none.
        true: values in the files, [N].

    Returns:
        `count` of rows, `rmse` of the baseline and of the emulator (`rmse_emulator`) over them, and
        `skill`, NaN where the baseline makes no error.
    """
    is_finite = np.isfinite(baseline)
    if not is_finite.any():
        return None
    own, other = (
        float(np.sqrt(np.mean((values[is_finite] - true[is_finite]) ** 2)))
        for values in (predicted, baseline)
    )
    return {
        "count": int(is_finite.sum()),
        "rmse": other,
        "rmse_emulator": own,
        "skill": 1 - own / other if other else float("nan"),
    }


def by_region_and_season(
    latitude: Floats,
    month: npt.NDArray[np.int64],
    true: Floats,
    predicted: Floats,
    baselines: Mapping[str, Floats],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Errors and skill of one output by region, then season; those without rows are left out.

    Args:
        latitude: latitudes of N rows in degrees, [N].
        month: calendar month of each, [N], 0 if it is unknown.
        true: values in the files, [N].
        predicted: values by the emulator, [N].
        baselines: values by each baseline, [N], by its name.

    Returns:
        `count`, `rmse`, `bias`, and for each baseline what `skill` returns.
    """
    seasons = {ALL: np.ones(len(month), bool)}
    seasons |= {name: np.isin(month, months) for name, months in SEASONS.items()}
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for region in REGIONS:
        for season, of_season in seasons.items():
            is_meant = inside(latitude, region) & of_season
            if not is_meant.any():
                continue
            error = predicted[is_meant] - true[is_meant]
            entry: dict[str, Any] = {
                "count": int(is_meant.sum()),
                "rmse": float(np.sqrt(np.mean(error**2))),
                "bias": float(np.mean(error)),
            }
            for name, values in baselines.items():
                entry[name] = skill(predicted[is_meant], values[is_meant], true[is_meant])
            table.setdefault(region, {})[season] = entry
    return table


def lines(
    name: str, table: Mapping[str, Mapping[str, Mapping[str, Any]]], baselines: Sequence[str]
) -> Iterator[str]:
    """Lines to print about an output, from `by_region_and_season`."""
    for region, by_season in table.items():
        for season, entry in by_season.items():
            shown = [
                f"skill {against['skill']:.3f} against {baseline} ({against['count']:,} points)"
                for baseline in baselines
                if (against := entry[baseline]) is not None
            ]
            if season != ALL or shown:
                label = (
                    f"{entry['count']:,} points  RMSE {entry['rmse']:.4g}  bias {entry['bias']:.2g}"
                )
                yield f"{name} {region} {season}: " + "  ".join([label, *shown])


def bars(
    by_season: Mapping[str, Mapping[str, Any]], baselines: Sequence[str]
) -> dict[str, list[float]]:
    """RMSE by season of the emulator and, for each baseline, of both over the baseline's rows.

    Args:
        by_season: entries of `by_region_and_season` for a region.
        baselines: names of the baselines.

    Returns:
        For each label, a number for each season, NaN where a baseline has no row.
    """
    entries = by_season.values()
    found = {"emulator": [float(entry["rmse"]) for entry in entries]}
    for baseline in baselines:
        against = [entry[baseline] or {} for entry in entries]
        for label, key in ((baseline, "rmse"), (f"emulator, rows of {baseline}", "rmse_emulator")):
            found[label] = [float(one.get(key, math.nan)) for one in against]
    return found


def draw_skill(
    path: Path,
    name: str,
    unit: str,
    table: Mapping[str, Mapping[str, Mapping[str, Any]]],
    baselines: Mapping[str, Baseline],
) -> Path:
    """Draw the errors of emulator and baselines, by region and season.

    Args:
        path: path of the PNG file to write.
        name: short name of the output.
        unit: its unit.
        table: what `by_region_and_season` returns.
        baselines: the baselines by name.
    """
    figure = new_figure(4.2 * len(table) + 1, 4, f"{name}: RMSE by region and season")
    panels = np.atleast_1d(figure.subplots(1, len(table), sharey=True))
    for axes, (region, by_season) in zip(panels, table.items(), strict=True):
        place = np.arange(len(by_season))
        series = bars(by_season, [*baselines])
        width = 0.8 / len(series)
        for number, (label, heights) in enumerate(series.items()):
            style: dict[str, Any] = {}
            if label not in ("emulator", *baselines):
                style = {"color": "C0", "alpha": 0.5, "hatch": "//"}
            axes.bar(place + number * width, heights, width, label=label, **style)
        axes.set_xticks(place + width * (len(series) - 1) / 2, list(by_season))
        axes.set(title=region)
    # Below the panels, where it does not cover a bar.
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8
    )
    panels[0].set_ylabel("RMSE" if unit == "1" else f"RMSE, {unit}")
    return save(figure, path)
