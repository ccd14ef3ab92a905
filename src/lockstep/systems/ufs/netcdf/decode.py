"""Decodes the numbers of a NetCDF variable: missing values, packing.

The netCDF library ignores, with a warning, attributes that do not fit a variable. They are errors
here: a missing value that is not recognised is a wrong value. Attributes that fit have the meaning
that the library gives them, so that values are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Masked = np.ma.MaskedArray[Any, Any]
Numbers = npt.NDArray[Any]

KEYS = (
    "missing_value", "_FillValue", "valid_range", "valid_min", "valid_max", "scale_factor",
    "add_offset", "_Unsigned",
)  # fmt: skip
"""The attributes that `decoded` uses."""


class Unusable(ValueError):
    """An attribute does not fit its variable; the message says which and why."""


_DEFAULT_FILL: Mapping[str, float] = {
    "i1": -127, "u1": 255, "i2": -32767, "u2": 65535, "i4": -2147483647, "u4": 4294967295,
    "i8": -9223372036854775806, "u8": 18446744073709551614,
    "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip
"""The library's fill value of each type, for values that were never written."""


def decoded(stored: Numbers, attributes: Mapping[str, Any]) -> Masked:
    """Values from numbers as they are stored.

    `missing_value` (one or several), `_FillValue` and the valid range apply to the stored numbers,
    not to the unpacked values.

    Args:
        stored: integers or floats of any shape, as the file stores them.
        attributes: those attributes of `KEYS` that the variable has, by name.

    Returns:
        `stored * scale_factor + add_offset`, missing values masked; NaN is not masked unless it is
        a missing value.

    Raises:
        Unusable: an attribute is not of numbers, or of numbers that the variable cannot hold.
    """
    default = _DEFAULT_FILL.get(stored.dtype.str[1:])
    if str(attributes.get("_Unsigned", "")).lower() == "true" and stored.dtype.kind == "i":
        default = None
        stored = stored.view(stored.dtype.str.replace("i", "u"))
        attributes = {key: _unsigned(value, stored.dtype) for key, value in attributes.items()}
    mask = np.zeros(stored.shape, bool)
    for key in ("missing_value", "_FillValue"):
        if key in attributes:
            for value in _fitting(key, attributes[key], stored.dtype):
                mask |= np.isnan(stored) if value != value else stored == value
    if "_FillValue" not in attributes and default is not None:
        mask |= stored == stored.dtype.type(default)
    low, high = _valid_range(attributes, stored.dtype)
    if low is not None:
        mask |= stored < low
    if high is not None:
        mask |= stored > high
    return np.ma.masked_array(_unpacked(stored, attributes), mask)


def _unpacked(stored: Numbers, attributes: Mapping[str, Any]) -> Numbers:
    scale, offset = (_factor(key, attributes) for key in ("scale_factor", "add_offset"))
    if scale is not None and offset is not None:
        if scale == 1 and offset == 0:
            return stored.astype(scale.dtype)
        return np.asarray(stored * scale + offset)
    if scale is not None and scale != 1:
        return np.asarray(stored * scale)
    if offset is not None and offset != 0:
        return np.asarray(stored + offset)
    return stored


def _factor(key: str, attributes: Mapping[str, Any]) -> Any:
    """A factor or offset of unpacking, None if there is none; integers become float64."""
    if key not in attributes:
        return None
    value = _numbers(key, attributes[key])
    if value.size != 1 or not np.isfinite(value[0]) or (key == "scale_factor" and not value[0]):
        raise Unusable(f"{key}={shown(attributes[key])}: must be one number, finite and not 0")
    return value[0] if value.dtype.kind == "f" else np.float64(value[0])


def _valid_range(attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The least and the greatest valid number, None where there is no limit."""
    if "valid_range" in attributes:
        both = _fitting("valid_range", attributes["valid_range"], dtype)
        if both.size != 2 or not (both[0] <= both[1]):
            raise Unusable(
                f"valid_range={shown(attributes['valid_range'])}: must be two numbers, the lesser "
                "first"
            )
        return both[0], both[1]
    limits = []
    for key in ("valid_min", "valid_max"):
        limit = _fitting(key, attributes[key], dtype) if key in attributes else None
        if limit is not None and (limit.size != 1 or np.isnan(limit[0])):
            raise Unusable(f"{key}={shown(attributes[key])}: must be one number")
        limits.append(None if limit is None else limit[0])
    return limits[0], limits[1]


def _fitting(key: str, value: Any, dtype: np.dtype[Any]) -> Numbers:
    """An attribute's numbers in the type of the variable; floats are rounded to it."""
    numbers = _numbers(key, value)
    with np.errstate(invalid="ignore", over="ignore"):
        cast = numbers.astype(dtype)
    if dtype.kind == "f":
        fits = np.isfinite(cast) | ~np.isfinite(numbers)
    else:
        fits = cast.astype(np.float64) == numbers.astype(np.float64)
    if not fits.all():
        raise Unusable(
            f"{key}={shown(value)}: is no value that the variable's type {dtype.name} has"
        )
    return cast


def _numbers(key: str, value: Any) -> Numbers:
    """An attribute's numbers [N], at least one."""
    numbers = np.asarray(value).reshape(-1)
    if numbers.dtype.kind not in "iuf" or not numbers.size:
        raise Unusable(f"{key}={shown(value)}: must be a number")
    return numbers


def _unsigned(value: Any, dtype: np.dtype[Any]) -> Any:
    """An attribute as unsigned numbers, if it has the stored type."""
    numbers = np.asarray(value)
    same = numbers.dtype.kind == "i" and numbers.dtype.itemsize == dtype.itemsize
    return numbers.view(dtype) if same else value


def shown(value: Any) -> str:
    """An attribute's value for messages, in one line that is not too long."""
    plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return printable(" ".join(repr(plain).split()))


def printable(text: str) -> str:
    """A text from a file for messages: in one line that is not too long."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:80])
    return clean if len(text) <= 80 else f"{clean}…"
