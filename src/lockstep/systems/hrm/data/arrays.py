"""Arrays of integers in .npy files, symmetries of a square, and random generators by their use.

The header of a file is parsed here, by a pattern, and not by NumPy, whose reader may warn,
evaluates the header as Python and trusts sizes that the file does not have. Written bytes are those
of `numpy.save`.
"""

from __future__ import annotations

import math
import os
import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.config.files import open_to_read
from lockstep.config.parsing import parse_int, shown
from lockstep.errors import ConfigError, DataError

T = TypeVar("T", bound=np.generic)

Integers = npt.NDArray[np.integer[Any]]
"""An array of any integer dtype."""

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 4096
_HEADER = re.compile(
    r"\{\s*'descr':\s*(?P<descr>'[^']*'|\[.*\]),\s*'fortran_order':\s*(?P<order>True|False),"
    r"\s*'shape':\s*\((?P<shape>[0-9, ]*)\),?\s*\}\s*",
    re.DOTALL,
)
_INTEGER = re.compile(r"'[<>|=][iu][1248]'")
_GET_AGAIN = "get the file again, or build the dataset again"

_WRITTEN_HEADER_BYTES = 128
"""Size of a header that `numpy.save` writes for an array of 1 or 2 dims."""

NUM_SYMMETRIES = 8

_TURNS = (0, 1, 2, 3, 0, 2, 1, 3)
"""Quarter turns to the left of each symmetry; those from 4 on are of the mirrored grid."""

_INVERSES = (0, 3, 2, 1, 4, 5, 6, 7)


class Use(IntEnum):
    """What random numbers are used for."""

    TRAIN = 1
    TEST = 2
    AUGMENT = 3
    SPLIT = 4
    CHOICE = 5
    TRANSLATE = 6


def keyed(seed: int, use: Use, number: int = 0) -> np.random.Generator:
    """A random generator for one use and one puzzle.

    Philox (Salmon et al. 2011) is counter-based: streams of different keys are independent.

    Raises:
        ConfigError: the seed is negative or has more than 63 bits.
    """
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed}: must be from 0 to 2^63 - 1")
    key = np.array([seed, use << 48 | number], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def transformed(grid: npt.NDArray[T], number: int) -> npt.NDArray[T]:
    """A grid [rows, columns] after a symmetry: 0-3 quarter turns to the left, or a mirror (4-7).

    4 swaps left and right, 5 top and bottom, 6 rows and columns; 7 mirrors along the other
    diagonal.

    Raises:
        DataError: there is no symmetry of that number.
    """
    if not 0 <= number < NUM_SYMMETRIES:
        raise DataError(f"symmetry {number}: must be from 0 to {NUM_SYMMETRIES - 1}")
    return np.rot90(np.fliplr(grid) if number >= 4 else grid, _TURNS[number])


def inverse(number: int) -> int:
    """The number of the inverse of a symmetry."""
    return _INVERSES[number]


def read_integers(path: Path) -> Integers:
    """The array of integers in an .npy file, mapped into memory and read-only.

    Args:
        path: path of the file; links are followed.

    Raises:
        DataError: the file is missing or unreadable, no .npy, pickled, of another dtype than
            integers, or holds fewer or more bytes than its header says.
    """
    try:
        with open_to_read(path, follow_links=True) as file:
            return _mapped(path, file)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; {_GET_AGAIN}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _mapped(path: Path, file: BinaryIO) -> Integers:
    dtype, shape, order = _read_header(path, file)
    start, size = file.tell(), os.fstat(file.fileno()).st_size
    expected = math.prod(shape) * dtype.itemsize
    if size - start != expected:
        problem = "truncated" if size - start < expected else "trailing bytes"
        raise DataError(
            f"{path}: {problem}: shape={shown(shape)} of {dtype.name} makes {shown(expected)} "
            f"bytes after the header, found {size - start:,}; {_GET_AGAIN}"
        )
    if expected == 0:
        if max(shape) > np.iinfo(np.intp).max // dtype.itemsize:
            raise DataError(f"{path}: shape={shown(shape)}: more than any array can have")
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", start, shape, order)


def _read_header(path: Path, file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Dtype, shape and order ("C" or "F"); leaves the file at the first number."""
    magic = file.read(8)
    if len(magic) < 8 or not magic.startswith(_MAGIC):
        raise DataError(f"{path}: is no .npy file: begins with {shown(magic)}; {_GET_AGAIN}")
    form = "<H" if magic[6] == 1 else "<I"
    length = file.read(struct.calcsize(form))
    if len(length) < struct.calcsize(form):
        raise DataError(f"{path}: truncated in its header; {_GET_AGAIN}")
    (num_bytes,) = struct.unpack(form, length)
    if num_bytes > _MOST_HEADER_BYTES:
        raise DataError(f"{path}: a header of {num_bytes:,} bytes: is damaged; {_GET_AGAIN}")
    text = file.read(num_bytes).decode("latin1")
    found = _HEADER.fullmatch(text)
    if not found or len(text) < num_bytes:
        raise DataError(f"{path}: header {shown(text)}: is damaged; {_GET_AGAIN}")
    if not _INTEGER.fullmatch(found["descr"]):
        raise DataError(f"{path}: dtype={shown(found['descr'].strip(chr(39)))}: must be integers")
    try:
        sizes = [parse_int(size) for size in found["shape"].split(",") if size.strip()]
    except ValueError as error:
        raise DataError(f"{path}: shape=({shown(found['shape'])}): {error}") from None
    if not 1 <= len(sizes) <= 2:
        raise DataError(f"{path}: shape={shown(tuple(sizes))}: must have 1 or 2 dims")
    order = "F" if found["order"] == "True" else "C"
    return np.dtype(found["descr"].strip("'")), tuple(sizes), order


class IntegersFile:
    """An .npy file that rows are appended to, so that an array may be larger than memory.

    It gets its header when it is closed.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, row: tuple[int, ...] = ()) -> None:
        """Create the file.

        Args:
            path: path of the file; there must be none.
            dtype: dtype of the integers that are stored.
            row: shape of a row: () for numbers, (n,) for rows of n numbers.

        Raises:
            OSError: it cannot be written.
        """
        self._dtype, self._row = np.dtype(dtype).newbyteorder("<"), row
        self._file = path.open("xb")
        self._file.write(bytes(_WRITTEN_HEADER_BYTES))
        self.num_rows = 0

    def append(self, rows: npt.ArrayLike) -> None:
        """Append rows: [n, *row], integers that the dtype can hold.

        Raises:
            OSError: they cannot be written.
        """
        values = np.asarray(rows)
        stored = np.ascontiguousarray(values, self._dtype)
        assert stored.shape[1:] == self._row
        assert np.array_equal(stored, values)
        self._file.write(stored.tobytes())
        self.num_rows += len(stored)

    def close(self) -> None:
        """Write the header, and flush the file to the disk.

        Raises:
            OSError: it cannot be written.
        """
        shape = (self.num_rows, *self._row)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        with self._file:
            self._file.seek(0)
            np.lib.format.write_array_header_1_0(self._file, header)
            assert self._file.tell() == _WRITTEN_HEADER_BYTES
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> IntegersFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; without a header after an exception, so that it is not readable."""
        if kind is None:
            self.close()
        else:
            self._file.close()
