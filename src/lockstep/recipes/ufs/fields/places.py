"""Checks of the places of a grid's cells: degrees, not radians, and the same in all files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.netcdf.decode import Masked

Places = tuple[Masked, Masked]
"""Latitude and longitude, of one shape."""

Box = tuple[float, float, float, float]
"""Least and greatest latitude, western and eastern longitude of a part of the globe, in degrees."""

EVERYWHERE: Box = (-90.0, 90.0, -180.0, 180.0)
"""The whole globe."""

REGIONS: Mapping[str, Box] = MappingProxyType(
    {
        "global": EVERYWHERE,
        "arctic": (50.0, 90.0, -180.0, 180.0),
        "antarctic": (-90.0, -50.0, -180.0, 180.0),
    }
)
"""Regions that have a name."""

TOLERANCE_DEG = 1e-4
"""Places that differ by less are the same: files round them differently."""

_TOLERANCE_RADIANS = 1e-3

_RANGES = (("latitude", -90.0, 90.0), ("longitude", -360.0, 720.0))


def check_degrees(path: Path, places: Places, said: bool, first_row: int = 0) -> None:
    """Check that places can be in degrees.

    Args:
        path: path of the places' file, for the message.
        places: latitude and longitude of cells, each [rows, columns].
        said: whether the file says that they are in degrees.
        first_row: number in the grid of the first of these rows.

    Raises:
        DataError: one is out of range; or all could be in radians, and the file does not say.
    """
    could_be_radians = True
    limits = zip(places, _RANGES, (math.pi / 2, 2 * math.pi), strict=True)
    for axis, (name, low, high), most_radians in limits:
        values = filled(axis)
        finite = values[np.isfinite(values)]
        if not finite.size:
            return
        least, greatest = float(finite.min()), float(finite.max())
        if least < low - TOLERANCE_DEG or greatest > high + TOLERANCE_DEG:
            bad = least if least < low - TOLERANCE_DEG else greatest
            row, column = np.argwhere(values == bad)[0]
            raise DataError(
                f"{path}: {name}: {bad:.6g} is outside {low:g} to {high:g} degrees, first in row "
                f"{first_row + row}, column {column}; mend it, or mark it as missing with the "
                "attribute _FillValue"
            )
        could_be_radians &= max(-least, greatest) < most_radians + _TOLERANCE_RADIANS
    if could_be_radians and not said:
        raise DataError(
            f"{path}: latitude: all places are within 1.57 of 0, as if they were in radians; must "
            "be in degrees. If they are, say so with the attribute units=degrees_north"
        )


def inside(
    latitude: npt.NDArray[Any], longitude: npt.NDArray[Any], box: Box
) -> npt.NDArray[np.bool_]:
    """Which points [N] are in a box; it may reach across the date line, and be the whole circle.

    Args:
        latitude: latitudes in degrees, [N].
        longitude: longitudes in degrees, however they are counted, [N].
        box: its limits; from the western longitude eastwards to the eastern one.
    """
    south, north, west, east = box
    is_inside: npt.NDArray[np.bool_] = (latitude >= south) & (latitude <= north)
    if east - west < 360:
        is_inside &= (longitude - west) % 360 <= (east - west) % 360
    return is_inside


def check_same(first: Path, expected: Places, other: Path, places: Places) -> None:
    """Check that cells are at the same places in two files; missing places are not compared.

    Args:
        first: path of the file of `expected`.
        expected: places of some cells, in degrees.
        other: path of the file of `places`.
        places: places of the same cells in the other file, of the same shape.

    Raises:
        DataError: they are not.
    """
    for (name, *_), one, two in zip(_RANGES, expected, places, strict=True):
        a, b = filled(one), filled(two)
        if np.array_equal(a, b, equal_nan=True):
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        gaps = np.abs(a - b)
        if name == "longitude":
            gaps = np.abs((gaps + 180) % 360 - 180)
        gap = float(np.nanmax(gaps, initial=0))
        if gap > TOLERANCE_DEG:
            turned = _direction(a) * _direction(b) < 0
            hint = f"; {name} runs the other way in one of them" if turned else ""
            raise DataError(
                f"{first} and {other}: are on different grids: {name} differs by up to {gap:.4g} "
                f"degrees{hint}"
            )


def _direction(values: npt.NDArray[Any]) -> float:
    """Whether values grow or fall, as a sign, from the first to the last row; 0 if neither."""
    finite = values[np.isfinite(values).reshape(len(values), -1).all(axis=1)]
    return float(np.sign(np.mean(finite[-1] - finite[0]))) if len(finite) > 1 else 0.0


def filled(axis: Masked) -> npt.NDArray[Any]:
    """Places as floats, NaN where they are missing."""
    floats = axis if axis.dtype.kind == "f" else axis.astype(np.float64)
    values: npt.NDArray[Any] = np.ma.filled(floats, np.nan)
    return values
