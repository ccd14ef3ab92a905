"""Opens NetCDF files and reads pieces of their variables, with errors for users.

HDF5 loops forever on some damaged files, without reacting to signals. So it runs in a thread of its
own, whose processor time is watched; waiting for a slow disk does not count.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import DataError, LockstepError, needing
from lockstep.systems.ufs.decoding import KEYS, Masked, Unusable, check_whole, decoded, printable
from lockstep.systems.ufs.fields import accepted, spelt

MOST_CPU_S = 5.0
"""Processor time that opening a file or reading one piece may take; they take milliseconds."""

MOST_VALUES = 1 << 24
"""Most values in one piece that is read; a band of the grid is far smaller."""

MOST_CHUNK_BYTES = 1 << 28
"""Most bytes of a chunk: the library holds all of it in memory to read a single value."""

_MOST_SHOWN = 40
_POLL_S = 0.5
_MAPS = Path("/proc/self/maps")


class Endless(Exception):
    """A call into a library has used too much processor time."""


def with_cpu_limit(call: Callable[[], Any]) -> Any:
    """The result of a call that releases the interpreter's lock while it works.

    Raises:
        Endless: it has used more than `MOST_CPU_S`. Its thread cannot be stopped and runs until the
            process ends.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # raised by the waiting thread
            outcome["error"] = error

    thread = threading.Thread(target=work, name="netcdf", daemon=True)
    thread.start()
    while True:
        thread.join(_POLL_S)
        if not thread.is_alive():
            break
        if _cpu_s(thread) > MOST_CPU_S:
            raise Endless(f"the library has computed for {MOST_CPU_S:g} s without an end")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def check_opens(path: str) -> None:
    """Open a NetCDF file and query its variables, as the netCDF4 package does first.

    The package, which must be imported, would hold the interpreter's lock. Errors are left to it.
    Nothing is done if its C library is not found.

    Args:
        path: absolute.

    Raises:
        Endless: it does not return.
    """
    library = _library()
    if library is None:
        return

    def query() -> None:
        number, num_variables = ctypes.c_int(), ctypes.c_int()
        name = path.encode(errors="surrogateescape")
        if library.nc_open(name, 0, ctypes.byref(number)) != 0:
            return
        library.nc_inq(number, None, ctypes.byref(num_variables), None, None)
        for variable in range(num_variables.value):
            # Reads the metadata of the variable, including its attributes.
            library.nc_inq_var(number, variable, None, None, None, None, None)
        library.nc_close(number)

    with_cpu_limit(query)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library that the netCDF4 package has loaded."""
    try:
        paths = re.findall(r"(/\S*/libnetcdf[^/\s]*\.so\S*)", _MAPS.read_text())
    except OSError:
        return None
    return ctypes.CDLL(paths[0]) if paths else None


def _cpu_s(thread: threading.Thread) -> float:
    """Processor time of a thread so far; 0 if the system does not measure it."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:  # the thread has ended
        return 0.0


class NetcdfFile:
    """A NetCDF file that is open for reading.

    Attributes:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            ConfigError: the netCDF4 package is not installed.
            DataError: there is no such file, or it is damaged, truncated or no NetCDF.
        """
        self.path = path
        with _readable(path):
            if not path.is_file():
                problem = "is no regular file" if path.exists() else "there is no such file"
                raise DataError(f"{path}: {problem}")
            check_whole(path)
            # The library would open a relative name that begins like a URL as a URL.
            name = os.path.abspath(path)
            dataset = netcdf4().Dataset
            check_opens(name)
            self._data = dataset(name, "r")
            self._data.set_auto_maskandscale(False)
            self._data.set_auto_chartostring(False)

    def close(self) -> None:
        """Close it."""
        self._data.close()

    @property
    def chunk_rows(self) -> int:
        """Rows of a field that are stored together; 1 if not chunked."""
        for variable in self._data.variables.values():
            chunks = variable.chunking()
            if len(variable.dimensions) > 2 and isinstance(chunks, list):
                return int(chunks[variable.dimensions[0].lower() == "time"])
        return 1

    @property
    def num_times(self) -> int:
        """The length of the dim `time`, whatever its case; 1 if there is none."""
        return next((len(d) for n, d in self._data.dimensions.items() if n.lower() == "time"), 1)

    def has_dim(self, name: str) -> bool:
        """Whether there is a dim of that name."""
        return name in self._data.dimensions

    def called(self, name: str) -> str | None:
        """The variable that has a name in lower or upper case; None if there is none."""
        return next((n for n in self._data.variables if n.lower() == name), None)

    def has(self, name: str) -> bool:
        """Whether there is a variable of that name."""
        return name in self._data.variables

    def dims(self, name: str) -> dict[str, int]:
        """Names and sizes of a variable's dims.

        Raises:
            DataError: there is no such variable (the message lists the others), it is not of
                numbers, has a dim twice, or its chunks are too large to be read.
        """
        variable = self._variable(name)
        sizes = dict(zip(variable.dimensions, map(int, variable.shape), strict=True))
        if len(sizes) < variable.ndim:
            names = ", ".join(map(printable, variable.dimensions))
            raise DataError(f"{self.path}: {name}: has one dim twice: ({names})")
        return sizes

    def text(self, name: str, key: str) -> str | None:
        """An attribute of a variable as text, None if it has none."""
        attributes = self._attributes(name, (key,))
        return str(attributes[key]) if attributes else None

    def unit_of(self, name: str, wanted: str, default: str) -> str:
        """The unit that a variable is stored in, which can be converted to `wanted`.

        Args:
            name: name of the variable.
            wanted: unit to convert to.
            default: stored unit of a variable without a `units` attribute.

        Raises:
            DataError: the attribute has a unit that cannot be converted.
        """
        written = self.text(name, "units")
        if written is None:
            return default
        unit = spelt(written, wanted)
        if unit is None:
            raise DataError(
                f"{self.path}: {name}: units={printable(written)!r}: must be "
                f"{' or '.join(accepted(wanted))}; convert the variable, or mend the attribute if "
                "it is wrong"
            )
        return unit

    def read(self, name: str, index: tuple[int | slice, ...]) -> Masked:
        """A piece of a variable, unpacked; missing values are masked, NaN is not.

        Args:
            name: name of the variable.
            index: for each of its dims, a number or a slice.

        Raises:
            DataError: the file is damaged there, the piece has more than `MOST_VALUES` values, or
                the attributes about missing or packed values do not fit the variable.
        """
        variable = self._variable(name)
        num_values = 1
        for size, part in zip(variable.shape, index, strict=True):
            num_values *= len(range(*part.indices(size))) if isinstance(part, slice) else 1
        if num_values > MOST_VALUES:
            raise DataError(
                f"{self.path}: {name}: has {num_values} values where at most {MOST_VALUES} can be; "
                "the size of a dim is wrong"
            )
        with _readable(self.path, name):
            stored = with_cpu_limit(lambda: np.asarray(variable[index]))
        try:
            return decoded(stored, self._attributes(name, KEYS))
        except Unusable as error:
            raise DataError(f"{self.path}: {name}: {error}; mend the attribute") from error

    def _variable(self, name: str) -> Any:
        if not self.has(name):
            raise DataError(self._missing(name))
        variable = self._data.variables[name]
        kind = variable.datatype
        if not isinstance(kind, np.dtype) or kind.kind not in "iuf":
            text = getattr(kind, "name", "text") if kind is not str else "text"
            raise DataError(f"{self.path}: {name}: is of type {text}; must be numbers")
        with _readable(self.path, name):
            chunks = variable.chunking() if variable.ndim else None
        if isinstance(chunks, list):
            num_bytes = kind.itemsize * int(np.prod(chunks, dtype=object))
            if num_bytes > MOST_CHUNK_BYTES:
                raise DataError(
                    f"{self.path}: {name}: is stored in chunks of {num_bytes} bytes; store it in "
                    f"chunks of at most {MOST_CHUNK_BYTES} with nccopy -c"
                )
        return variable

    def _attributes(self, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
        """Some attributes of a variable, those that it has."""
        variable = self._data.variables[name]
        with _readable(self.path, name):
            return {key: variable.getncattr(key) for key in variable.ncattrs() if key in keys}

    def _missing(self, name: str) -> str:
        """The message for a missing variable."""
        names = list(self._data.variables)
        nearest = difflib.get_close_matches(name, names[:1000], n=1, cutoff=0.5)
        hint = f"; the nearest is {printable(nearest[0])}" if nearest else ""
        known = ", ".join(printable(n) for n in names[:_MOST_SHOWN]) or "none"
        known += f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        groups = "; those in groups are not looked at" if self._data.groups else ""
        return f"{self.path}: has no variable {name}{hint} (it has {known}{groups})"


@contextmanager
def new_netcdf(path: Path) -> Iterator[Any]:
    """A NetCDF-4 dataset for writing, which gets its name once it is complete.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with closing(netcdf4().Dataset(temporary, "w")) as data:
            yield data
        temporary.replace(path)
    except RuntimeError as error:  # the library's own, for a full disk too
        raise OSError(f"{path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def netcdf4() -> Any:
    """The netCDF4 package.

    Raises:
        ConfigError: it is not installed.
    """
    with needing("ufs", "NetCDF files need the netCDF4 package"):
        import netCDF4
    return netCDF4


@contextmanager
def _readable(path: Path, name: str = "") -> Iterator[None]:
    """Turns exceptions from a damaged file into one message."""
    where = f"{path}: {name}" if name else str(path)
    try:
        yield
    except LockstepError:
        raise
    except PermissionError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    except Exception as error:  # the library raises exceptions of any kind
        detail = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(
            f"{where}: is not NetCDF, or is truncated or damaged ({printable(str(detail))}); get "
            "the file again"
        ) from error
