"""Small NetCDF files to attack readers with: good ones, and what can be wrong with them.

There are two layouts: `grid`, a history file as training reads it, and `rows`, one-dimensional
variables as the C++ program reads them. Each kind of damage is done to one variable of either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import netCDF4
import numpy as np

Layout = Literal["grid", "rows"]
FORMATS = {1: "NETCDF3_CLASSIC", 2: "NETCDF3_64BIT_OFFSET", 5: "NETCDF3_64BIT_DATA"}

NAMES = ("sst", "hi", "uatm", "qref", "tair")
"""The inputs of both layouts; the grid has `aice` too."""

NUM_ROWS, NUM_COLUMNS = 6, 5

_STORED: Mapping[Layout, Mapping[str, str]] = {
    "grid": {
        "sst": "sst_h",
        "hi": "hi_h",
        "uatm": "uatm_h",
        "qref": "Qref_h",
        "tair": "Tair_h",
        "aice": "aice_h",
    },
    "rows": {name: name for name in NAMES},
}
_TYPICAL = {"sst": -1.0, "hi": 1.0, "uatm": 2.0, "qref": 1e-3, "tair": -5.0, "aice": 0.5}
_UNIT = {"sst": "degC", "hi": "m", "uatm": "m/s", "qref": "kg/kg", "tair": "degC", "aice": "1"}


def values(name: str, layout: Layout) -> np.ndarray[Any, Any]:
    """What a good file holds of a variable: all values differ."""
    shape = (2, NUM_ROWS, NUM_COLUMNS) if layout == "grid" else (NUM_ROWS,)
    steps = np.arange(np.prod(shape)).reshape(shape)
    return (_TYPICAL[name] * (1 + 0.005 * steps)).astype(np.float32)


def victim(layout: Layout) -> str:
    """The stored name of the variable that is damaged."""
    return _STORED[layout]["sst"]


def good(path: Path, layout: Layout, form: str = "NETCDF4", first: str = "sst") -> None:
    """A file in which all is right; `first` is the variable that is stored first."""
    with netCDF4.Dataset(path, "w", format=form) as data:
        fill(data, layout, first=first)


def fill(data: Any, layout: Layout, without: str = "", first: str = "sst") -> None:
    """The dims and variables of a good file, but one."""
    if layout == "rows":
        data.createDimension("row", NUM_ROWS)
    else:
        for name, size in (("time", None), ("nj", NUM_ROWS), ("ni", NUM_COLUMNS)):
            data.createDimension(name, size)
    dims = dims_of(layout)
    names = sorted(_STORED[layout], key=lambda name: name != first)
    for name in names:
        if name != without:
            made = data.createVariable(_STORED[layout][name], "f4", dims)
            made.units = _UNIT[name]
    if layout == "grid":
        degrees = {"ULAT": "degrees_north", "ULON": "degrees_east"}
        for name in ("umask", *degrees):
            made = data.createVariable(name, "f4", dims[1:])
            made.units = degrees.get(name, "1")
        data.createVariable("time", "f8", ("time",))
    # All data last: the order on disk is that of the definitions.
    for name in names:
        if name != without:
            data[_STORED[layout][name]][:] = values(name, layout)
    if layout == "grid":
        data["umask"][:] = 1
        data["ULAT"][:] = np.linspace(60, 85, NUM_ROWS)[:, None]
        data["ULON"][:] = np.linspace(0, 300, NUM_COLUMNS)[None]
        data["time"][:] = np.arange(2.0)


def dims_of(layout: Layout) -> tuple[str, ...]:
    """The dims of a good variable."""
    return ("row",) if layout == "rows" else ("time", "nj", "ni")


Make = Callable[[Path, Layout], None]


def content(found: bytes) -> Make:
    """A file with these bytes."""
    return lambda path, _: path.write_bytes(found) and None


def cut(version: int) -> Make:
    """A good classic file without its second half."""

    def make(path: Path, layout: Layout) -> None:
        good(path, layout, FORMATS[version])
        os.truncate(path, path.stat().st_size // 2)

    return make


def patched(old: bytes, new: bytes, version: int = 1) -> Make:
    """A good classic file, some bytes of whose header are replaced."""

    def make(path: Path, layout: Layout) -> None:
        good(path, layout, FORMATS[version])
        found = path.read_bytes()
        assert old in found
        path.write_bytes(found.replace(old, new, 1))

    return make


def header(version: int, *parts: int | bytes) -> Make:
    """A classic file with these 4-byte numbers and bytes behind its magic, then zeros."""
    packed = (part if isinstance(part, bytes) else part.to_bytes(4, "big") for part in parts)
    return content(b"CDF" + bytes([version]) + b"".join(packed) + bytes(400))


def poked(value: Any) -> Make:
    """The victim has this value everywhere."""

    def make(path: Path, layout: Layout) -> None:
        good(path, layout)
        with netCDF4.Dataset(path, "a") as data:
            data[victim(layout)][:] = value

    return make


def attributed(**attributes: Any) -> Make:
    """The victim has these attributes."""

    def make(path: Path, layout: Layout) -> None:
        good(path, layout)
        with netCDF4.Dataset(path, "a") as data:
            data[victim(layout)].setncatts(attributes)

    return make


def replaced(create: Callable[[Any, str, tuple[str, ...]], None]) -> Make:
    """The victim is made by `create(data, name, dims)`."""

    def make(path: Path, layout: Layout) -> None:
        with netCDF4.Dataset(path, "w") as data:
            fill(data, layout, without="sst")
            create(data, victim(layout), dims_of(layout))

    return make


def packed(**attributes: Any) -> Make:
    """The victim is made of small integers with these attributes."""

    def create(data: Any, name: str, dims: tuple[str, ...]) -> None:
        made = data.createVariable(name, "i2", dims, fill_value=attributes.pop("_FillValue", None))
        made.set_auto_maskandscale(False)
        made[:] = np.broadcast_to(np.int16(7), [len(data.dimensions[d]) for d in dims])
        made.setncatts(attributes)

    return replaced(create)


def sized(size: int | None, at: int | None = None) -> Make:
    """All variables are on a dim of another size, unwritten but for one value."""

    def make(path: Path, layout: Layout) -> None:
        with netCDF4.Dataset(path, "w") as data:
            dims = dims_of(layout)
            for name in dims:
                data.createDimension(name, size if name in ("row", "nj") else 2)
            for name in _STORED[layout].values():
                data.createVariable(name, "f4", dims)
                if at is not None:
                    data[name][(*(0,) * (len(dims) - 2), at, 0)[-len(dims) :]] = 1.0
            for name in ("umask", "ULAT", "ULON"):
                data.createVariable(name, "f4", ("nj", "ni")) if layout == "grid" else None

    return make


def _text(data: Any, name: str, dims: tuple[str, ...]) -> None:
    data.createVariable(name, "S1", dims)[:] = "x"


def _strings(data: Any, name: str, dims: tuple[str, ...]) -> None:
    data.createVariable(name, str, dims)


def _compound(data: Any, name: str, dims: tuple[str, ...]) -> None:
    kind = data.createCompoundType(np.dtype([("a", "f4"), ("b", "f4")]), "two")
    data.createVariable(name, kind, dims)


def _lists(data: Any, name: str, dims: tuple[str, ...]) -> None:
    data.createVariable(name, data.createVLType(np.float32, "list"), dims)


def _enum(data: Any, name: str, dims: tuple[str, ...]) -> None:
    data.createVariable(name, data.createEnumType(np.int8, "ice", {"no": 0, "yes": 1}), dims)


def _in_group(data: Any, name: str, dims: tuple[str, ...]) -> None:
    data.createGroup("fields").createVariable(name, "f4", dims)[:] = 1


def _chunked(data: Any, name: str, dims: tuple[str, ...]) -> None:
    dim = "huge"
    data.createDimension(dim, None)
    dims = (*dims[:-1], dim)
    chunks = (*(1,) * (len(dims) - 1), 1 << 29)
    data.createVariable(name, "f4", dims, chunksizes=chunks, zlib=True)


def _other_size(data: Any, name: str, dims: tuple[str, ...]) -> None:
    data.createDimension("other", 9)
    data.createVariable(name, "f4", (*dims[:-1], "other"))


def _many(data: Any, name: str, dims: tuple[str, ...]) -> None:
    for number in range(300):
        data.createVariable(f"variable_{number}", "f4", dims)


HOSTILE: Mapping[str, Make] = {
    "empty": content(b""),
    "text": content(b"sst,hi,uatm,qref\n-1,1,2,0.001\n"),
    "random": content(bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8))),
    "zeros": content(bytes(1_000_000)),
    "gzip": content(b"\x1f\x8b\x08" + bytes(100)),
    "magic only": content(b"CDF\x01"),
    "magic of HDF5 only": content(b"\x89HDF\r\n\x1a\n"),
    "magic of HDF5 with zeros": content(b"\x89HDF\r\n\x1a\n" + bytes(3000)),
    "version 3": content(b"CDF\x03" + bytes(500)),
    "directory": lambda path, _: path.mkdir(),
    "pipe": lambda path, _: os.mkfifo(path),
    "dangling link": lambda path, _: path.symlink_to("nowhere"),
    "nothing there": lambda path, _: None,
    "half of CDF-1": cut(1),
    "half of CDF-2": cut(2),
    "half of CDF-5": cut(5),
    "records not counted": header(1, 0xFFFFFFFF, 0, 0, 0, 0, 0, 0),
    "no variables": header(2, 0, 0, 0, 0, 0, 0, 0),
    "2^31 - 1 dims": header(1, 0, 10, 0x7FFFFFFF),
    "2^31 - 1 variables": header(1, 0, 0, 0, 0, 0, 11, 0x7FFFFFFF),
    "2^31 - 1 attributes": header(1, 0, 0, 0, 12, 0x7FFFFFFF),
    "2^63 - 1 dims": header(5, 0, 0, 10, 0x7FFFFFFF, 0xFFFFFFFF),
    "a name of 2 GiB": header(1, 0, 10, 1, 0x7FFFFFFF),
    "an attribute of 8 GiB": header(1, 0, 0, 0, 12, 1, 1, b"a\0\0\0", 4, 0x7FFFFFFF),
    "an attribute of type 99": header(1, 0, 0, 0, 12, 1, 1, b"a\0\0\0", 99, 1, 1),
    "wrong list": header(1, 0, 77, 1, 1, b"a\0\0\0", 1),
    "dim that is not there": header(1, 0, 0, 0, 0, 0, 11, 1, 1, b"a\0\0\0", 1, 5, 0, 0, 4, 4, 80),
    "inside the header": header(1, 0, 0, 0, 0, 0, 11, 1, 1, b"a\0\0\0", 0, 0, 0, 4, 4, 8),
    "inside each other": header(
        1,
        0,
        10,
        1,
        1,
        b"x\0\0\0",
        4,
        0,
        0,
        11,
        2,
        1,
        b"a\0\0\0",
        1,
        0,
        0,
        0,
        5,
        16,
        200,
        1,
        b"b\0\0\0",
        1,
        0,
        0,
        0,
        5,
        16,
        208,
    ),
    "behind the end": header(1, 0, 0, 0, 0, 0, 11, 1, 1, b"a\0\0\0", 0, 0, 0, 4, 4, 1 << 30),
    "a fixed dim of 2^31 - 1": header(
        1, 0, 10, 1, 1, b"x\0\0\0", 0x7FFFFFFF, 0, 0, 11, 1, 3, b"sst\0", 1, 0, 0, 0, 6, 8, 100
    ),
    "2^31 - 1 records": header(
        1, 0x7FFFFFFF, 10, 1, 1, b"x\0\0\0", 0, 0, 0, 11, 1, 3, b"sst\0", 1, 0, 0, 0, 6, 8, 100
    ),
    "units that are no text": patched(b"degC", b"\xff\xfe\xff\xfe"),
    "missing variable": replaced(lambda *_: None),
    "in a group": replaced(_in_group),
    "hundreds of others": replaced(_many),
    "characters": replaced(_text),
    "strings": replaced(_strings),
    "compound": replaced(_compound),
    "lists": replaced(_lists),
    "enum": replaced(_enum),
    "scalar": replaced(lambda data, name, _: data.createVariable(name, "f4")),
    "one dim more": replaced(lambda d, n, dims: d.createVariable(n, "f4", (*dims, dims[-1]))),
    "another size": replaced(_other_size),
    "chunks of 2 GiB": replaced(_chunked),
    "length 0": sized(None),
    "2^31 - 1 long": sized((1 << 31) - 1),
    "2^31 - 1 long by one value": sized(None, at=(1 << 31) - 2),
    "NaN": poked(np.nan),
    "infinite": poked(np.inf),
    "huge": poked(3e38),
    "default fill": poked(netCDF4.default_fillvals["f4"]),
    "in K": poked(271.0),
    "K by unit": attributed(units="K"),
    "unknown unit": attributed(units="furlongs"),
    "numbers as unit": attributed(units=np.arange(3)),
    "unit of 1 MB": attributed(units="x" * 1_000_000),
    "all missing": attributed(missing_value=values("sst", "grid").reshape(-1)),
    "missing_value is text": attributed(missing_value="none"),
    "missing_value too large": attributed(missing_value=1e300),
    "missing_value of no integer": packed(missing_value=1e20),
    "missing_value of half an integer": packed(missing_value=-0.5),
    "packed and all missing": packed(_FillValue=7, scale_factor=0.1),
    "scale_factor is text": packed(scale_factor="0.1"),
    "scale_factor NaN": packed(scale_factor=np.nan),
    "scale_factor 0": packed(scale_factor=0.0),
    "scale_factor twice": packed(scale_factor=[0.1, 0.2]),
    "add_offset infinite": packed(add_offset=np.inf),
    "add_offset to K": packed(add_offset=273.15),
    "valid_range of one": attributed(valid_range=np.float32(1)),
    "valid_range the wrong way": attributed(valid_range=np.array([5, -5], np.float32)),
    "valid_range without any": attributed(valid_range=np.array([30, 40], np.float32)),
    "valid_min NaN": attributed(valid_min=np.float32(np.nan)),
    "valid_max below all": attributed(valid_max=np.float32(-30)),
}
"""By what is wrong; each makes a file at a path that does not exist yet."""
