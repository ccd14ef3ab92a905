"""Fields at chosen cells, whatever the rows of a run are: what predictions are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.bands import ranges
from lockstep.recipes.ufs.fields.places import check_same
from lockstep.recipes.ufs.fields.sources import Source
from lockstep.recipes.ufs.fields.times import Moment


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
