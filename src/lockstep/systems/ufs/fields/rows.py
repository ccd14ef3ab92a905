"""The rows of a run: chosen, split by blocks or times, and their exact statistics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.systems.ufs.fields.bands import draw, load, ranges
from lockstep.systems.ufs.fields.grids import check_same
from lockstep.systems.ufs.fields.scenes import Moment
from lockstep.systems.ufs.fields.sources import Source

_HALF_BITS = 24
_CHUNK = 1 << 22
"""Sums of so many 24-bit integers are exact in float64."""


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of numbers, without any rounding.

    Attributes:
        count: number of numbers.
        total: exact sum of the numbers.
        squares: exact sum of their squares.
    """

    count: int = 0
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Moments:
        """The moments of finite numbers [N], float32."""
        assert values.dtype == np.float32
        moments = cls()
        for first in range(0, len(values), _CHUNK):
            chunk = values[first : first + _CHUNK].astype(np.float64)
            # The square of a 24-bit number has 48 bits: exact in float64.
            moments += cls(len(chunk), _exact_sum(chunk), _exact_sum(chunk * chunk))
        return moments

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of numbers together."""
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """The mean, correctly rounded to float64."""
        return float(self.total / self.count)

    @property
    def deviation(self) -> float:
        """The population standard deviation, within a rounding of float64."""
        mean = self.total / self.count
        return math.sqrt(self.squares / self.count - mean * mean)


def _exact_sum(values: npt.NDArray[np.float64]) -> Fraction:
    """The sum of numbers of at most 48 significant bits each."""
    mantissas, exponents = np.frexp(values)
    lowest = int(exponents.min(initial=0))
    integers = np.ldexp(mantissas, 2 * _HALF_BITS).astype(np.int64)
    # Halves of 24 bits, added up apart for each exponent: below 2^53, so exact.
    high = np.bincount(exponents - lowest, integers >> _HALF_BITS)
    low = np.bincount(exponents - lowest, integers & ((1 << _HALF_BITS) - 1))
    total = sum(
        (int(h) * 2**_HALF_BITS + int(lo)) << k
        for k, (h, lo) in enumerate(zip(high, low, strict=True))
    )
    return Fraction(total) * Fraction(2) ** (lowest - 2 * _HALF_BITS)


LEAST_DEVIATION = 1e-6
"""A column that varies less is not scaled."""

_SPLITS = ("val", "test")
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Cells with their values, N of them; columns as in the `Selection`.

    Attributes:
        values: values in the variables' units, [N, variables], float32.
        cell: number of each row's cell in the grid, [N], int64.
        time: number of each row's scene, [N], int32.
        place: latitude and longitude in degrees, [N, 2], float32.
    """

    values: npt.NDArray[np.float32]
    cell: npt.NDArray[np.int64]
    time: npt.NDArray[np.int32]
    place: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.cell)

    def take(self, chosen: Bools | Ints) -> Rows:
        """The rows that a mask [N] or indices [M] choose."""
        return Rows(**{name: array[chosen] for name, array in vars(self).items()})


def num_rows(paths: Sequence[Path]) -> int:
    """How many rows all bands, from `keep_bands`, have together."""
    return sum(int(load(path, "counts")[0][-1]) for path in paths)


def gather(paths: Sequence[Path], most: int) -> Rows:
    """At most `most` rows of all bands: those that `draw` gives the least numbers.

    The files are gone through twice, so that memory holds the chosen rows and one band.

    Args:
        paths: the files of all bands, from `keep_bands`.
        most: greatest number of rows; of more, this many are drawn, from everywhere alike.
    """
    drawn = [draw(*load(path, "cell", "time")) for path in paths]
    whole = np.concatenate(drawn)
    limit = np.partition(whole, most)[most] if len(whole) > most else np.inf
    parts = []
    for path, numbers in zip(paths, drawn, strict=True):
        chosen = np.flatnonzero(numbers < limit)
        values, cell, time, place = load(path, "values", "cell", "time", "place")
        parts.append(Rows(values[:, chosen].T, cell[chosen], time[chosen], place[:, chosen].T))
    return joined(parts)


def digest(rows: Rows) -> str:
    """SHA-256 of all rows."""
    sha256 = hashlib.sha256()
    for array in vars(rows).values():
        sha256.update(f"{array.dtype.str}{array.shape}".encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, of which there is at least one."""
    names = Rows.__dataclass_fields__
    return Rows(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def blocks(rows: Rows, num_columns: int, size: int) -> Ints:
    """The number of each row's block, which has `size` x `size` cells of the grid at all times.

    Args:
        rows: N rows.
        num_columns: number of columns of the grid.
        size: rows and columns of a block.

    Returns:
        Numbers of blocks, [N], int64.
    """
    across = -(-num_columns // size)
    numbers: Ints = rows.cell // num_columns // size * across + rows.cell % num_columns // size
    return numbers


def split(
    rows: Rows, group: Ints, by: Literal["blocks", "time"], val: float, test: float
) -> dict[str, Rows]:
    """Training, validation and test rows; neighbours stay together.

    Args:
        rows: all rows, N of them.
        group: number of each row's block, or its scene's place in time, [N], int64.
        by: what groups are: `blocks` takes whole blocks in an order that looks random, `time` the
            last scenes.
        val: part of the rows for validation, 0 for none.
        test: part of the rows for testing, 0 for none.

    Returns:
        Rows by `train`, `val` and `test`; only those that are to be there.

    Raises:
        DataError: there are too few blocks or scenes.
    """
    units, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    order = (
        np.argsort(draw(units.astype(np.int64), -1))
        if by == "blocks"
        else np.arange(len(units))[::-1]
    )
    label = np.zeros(len(units), np.int8)
    position = 0
    for number, part in enumerate((val, test), start=1):
        # Whole units, until there are enough rows; at least one, if any are wanted.
        wanted, taken = part * len(rows), 0
        while taken < wanted and position < len(order):
            label[order[position]] = number
            taken += int(counts[order[position]])
            position += 1
    if position >= len(units):
        what = "blocks of the grid; lower split_block_cells" if by == "blocks" else "times"
        raise DataError(
            f"split={by}: val_fraction={val} and test_fraction={test} leave nothing to train on: "
            f"the {len(rows)} rows are of {len(units)} {what}"
        )
    splits = {
        name: rows.take(label[index] == number) for number, name in enumerate(("train", *_SPLITS))
    }
    return {name: part for name, part in splits.items() if len(part)}


def first_spread(rows: Rows, count: int) -> Rows:
    """The same rows with `count` evenly spaced ones (all, if there are fewer) in front."""
    count = min(count, len(rows))
    front = (2 * np.arange(count) + 1) * len(rows) // max(1, 2 * count)
    rest = np.ones(len(rows), bool)
    rest[front] = False
    return rows.take(np.concatenate([front, np.flatnonzero(rest)]))


@dataclass(frozen=True)
class Scale:
    """Mean and population standard deviation of each variable.

    Attributes:
        mean: mean of each variable in its unit, [variables], float64.
        deviation: standard deviation of each variable in its unit, [variables], float64; 1 for one
            that does not vary.
    """

    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]


def scale_of(parts: Iterable[Rows]) -> Scale:
    """Statistics of all rows of all parts: the same to the last bit however they are cut."""
    columns = zip(
        *([Moments.of(column) for column in part.values.T] for part in parts), strict=True
    )
    moments = [reduce(Moments.__add__, column) for column in columns]
    deviation = np.array([m.deviation for m in moments])
    return Scale(
        np.array([m.mean for m in moments]),
        np.where(deviation > LEAST_DEVIATION, deviation, 1.0),
    )


def at_cells(
    source: Source, names: Sequence[str], cells: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Variables of a scene at cells, [N, names]; NaN on land and where they are missing.

    Args:
        source: scene to read.
        names: short names of the variables.
        cells: numbers of N cells in the grid, [N], int64.

    Raises:
        DataError: the file is damaged, or has values that cannot be right.
    """
    found = np.full((len(cells), len(names)), np.nan)
    with closing(source.open()) as scene:
        scene.check(names)
        width = scene.shape[1]
        for rows in ranges(scene):
            first, last = rows.start * width, rows.stop * width
            here = np.flatnonzero((cells >= first) & (cells < last))
            if not len(here):
                continue
            here = here[scene.ocean(rows).reshape(-1)[cells[here] - first]]
            for column, name in enumerate(names):
                field = scene.field(name, rows, cells[here] - first)
                found[here, column] = np.where(field.there, field.values, np.nan)
    return found


def check_one_grid(first: Source, other: Source) -> None:
    """Check that two scenes are on the same grid.

    Raises:
        DataError: they are not.
    """
    with closing(first.open()) as one, closing(other.open()) as two:
        if one.shape != two.shape:
            shown = " and ".join(f"{a}x{b}" for a, b in (one.shape, two.shape))
            raise DataError(f"{one.paths[-1]} and {two.paths[-1]}: are on different grids: {shown}")
        for rows in ranges(one):
            places = one.coordinates(rows), two.coordinates(rows)
            check_same(one.paths[-1], places[0], two.paths[-1], places[1])


def moments_of(sources: Sequence[Source]) -> list[Moment]:
    """The time of each scene, in order."""
    by_paths: dict[object, list[Moment]] = {}
    for source in sources:
        if source.paths not in by_paths:
            with closing(source.open()) as scene:
                by_paths[source.paths] = scene.all_moments()
    return [by_paths[source.paths][source.time] for source in sources]
