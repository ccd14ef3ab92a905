"""Checks and decodes what the netCDF library lets pass: incomplete files, wrong attributes.

The library reads a truncated classic file (CDF-1, CDF-2, CDF-5) as if zeros or values of other
variables followed. The header has the offset and the size of each variable, and so the size of the
complete file. NetCDF-4 files are HDF5, which checks this itself.

The library ignores, with a warning, attributes that do not fit a variable. They are errors here: a
missing value that is not recognised is a wrong value. Attributes that fit have the meaning that the
library gives them, so that values are the same to the last bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_HDF5 = b"\x89HDF\r\n\x1a\n"
_FIRST_USER_BLOCK = 512
_VERSIONS = (1, 2, 5)
_BYTES_OF_TYPE = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)
_DIMS, _VARIABLES, _ATTRIBUTES = 10, 11, 12
_LONGEST_NAME = 4096
_LONGEST_HEADER = 1 << 24
"""Bytes; the library keeps all of a header in memory."""


class Damaged(Exception):
    """A file is not NetCDF, or is incomplete; the message says why."""


def check_whole(path: Path) -> None:
    """Check that a file is NetCDF and, if it is a classic one, that it is complete.

    Raises:
        Damaged: it is not.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        magic = file.read(len(_HDF5))
        if magic[:3] == b"CDF" and magic[3:4] and magic[3] in _VERSIONS:
            _Header(file, size, magic[3]).check()
        elif not _is_hdf5(file, size):
            raise Damaged("it begins with neither CDF nor HDF")


def _is_hdf5(file: BinaryIO, size: int) -> bool:
    """Whether HDF5's signature is at the start, or behind a user block of 512 bytes or more."""
    position = 0
    while position < size:
        file.seek(position)
        if file.read(len(_HDF5)) == _HDF5:
            return True
        position = max(2 * position, _FIRST_USER_BLOCK)
    return False


@dataclass(frozen=True)
class _Stored:
    """A variable's position in the file.

    Attributes:
        name: name of the variable.
        is_record: whether the variable's first dim is the record dim.
        begin: offset of the first value in the file, in bytes.
        num_bytes: size of the values in bytes; of one record, if `is_record`.
    """

    name: str
    is_record: bool
    begin: int
    num_bytes: int


class _Header:
    """The header of a classic file: numbers are big-endian, everything is padded to 4 bytes."""

    def __init__(self, file: BinaryIO, size: int, version: int) -> None:
        self._file = file
        self._size = size
        self._count_bytes = 8 if version == 5 else 4
        self._offset_bytes = 4 if version == 1 else 8
        file.seek(4)

    def check(self) -> None:
        """Check that the file is as long as its header says."""
        num_records = self._count()
        if num_records == (1 << 8 * self._count_bytes) - 1:
            raise Damaged(
                "its header does not say how many records there are, so whether all are there "
                "cannot be known; write it again with nccopy"
            )
        dims = self._dims()
        self._skip_attributes()
        variables = [self._variable(dims) for _ in range(self._list_of(_VARIABLES))]
        end = self._file.tell()
        records = [_padded(v.num_bytes) for v in variables if v.is_record]
        # A single record variable is stored without padding between its records.
        stride = sum(v.num_bytes for v in variables if v.is_record)
        stride = stride if len(records) == 1 else sum(records)
        stored = [v for v in variables if v.num_bytes and (num_records or not v.is_record)]
        for variable in stored:
            count = num_records if variable.is_record else 1
            if variable.begin < end:
                raise Damaged(f"{variable.name}: its place is inside the header")
            needed = variable.begin + (count - 1) * stride + variable.num_bytes
            if needed > self._size:
                raise Damaged(
                    f"it has {self._size} bytes; {variable.name} alone needs the first {needed}"
                )
        # Record variables are compared with one another in their first record, and together with
        # all others.
        first = [v for v in stored if v.is_record]
        _check_apart(first)
        begin = min((v.begin for v in first), default=0)
        whole = [_Stored("the records", True, begin, num_records * stride)] if first else []
        _check_apart([v for v in stored if not v.is_record] + whole)

    def _dims(self) -> list[int]:
        """The lengths of all dims; 0 is the record dim's."""
        lengths = []
        for _ in range(self._list_of(_DIMS)):
            self._name()
            lengths.append(self._count())
        return lengths

    def _variable(self, dims: list[int]) -> _Stored:
        name = self._name()
        numbers = [self._count() for _ in range(self._plausible(self._count()))]
        if any(number >= len(dims) for number in numbers):
            raise Damaged(f"{name}: has a dim that is not there")
        sizes = [dims[number] for number in numbers]
        self._skip_attributes()
        element = self._type_bytes()
        self._count()  # the size in bytes, which overflows above 4 GiB
        begin = self._number(self._offset_bytes)
        is_record = bool(sizes) and sizes[0] == 0
        return _Stored(name, is_record, begin, element * math.prod(sizes[is_record:]))

    def _skip_attributes(self) -> None:
        for _ in range(self._list_of(_ATTRIBUTES)):
            self._name()
            element = self._type_bytes()
            self._skip(_padded(element * self._count()))

    def _list_of(self, kind: int) -> int:
        """The number of entries of a list; an absent list has 0 for its kind and its count."""
        tag, count = self._number(4), self._count()
        if tag != kind and (tag or count):
            raise Damaged(f"its header has {tag} where a list of kind {kind} must be")
        return self._plausible(count)

    def _plausible(self, count: int) -> int:
        """A number of entries, each of which takes 4 bytes at least."""
        if 4 * count > self._size - self._file.tell():
            raise Damaged("its header ends too early")
        return count

    def _type_bytes(self) -> int:
        number = self._number(4)
        if not 0 < number < len(_BYTES_OF_TYPE):
            raise Damaged(f"its header has type {number}, which is not there")
        return _BYTES_OF_TYPE[number]

    def _name(self) -> str:
        length = self._count()
        if length > _LONGEST_NAME:
            raise Damaged(f"its header has a name of {length} bytes")
        text = self._read(length)
        self._skip(_padded(length) - length)
        return text.decode(errors="replace")

    def _count(self) -> int:
        return self._number(self._count_bytes)

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._read(num_bytes), "big")

    def _skip(self, num_bytes: int) -> None:
        end = self._file.tell() + num_bytes
        if end > min(self._size, _LONGEST_HEADER):
            raise Damaged(f"its header is longer than {min(self._size, _LONGEST_HEADER)} bytes")
        self._file.seek(end)

    def _read(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes)
        if len(content) < num_bytes or self._file.tell() > _LONGEST_HEADER:
            raise Damaged("its header ends too early or does not end")
        return content


def _check_apart(stored: list[_Stored]) -> None:
    for one, two in pairwise(sorted(stored, key=lambda v: v.begin)):
        if one.begin + one.num_bytes > two.begin:
            raise Damaged(f"{two.name}: its place is inside that of {one.name}")


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % 4


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
