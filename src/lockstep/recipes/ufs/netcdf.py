"""Opening NetCDF files and reading pieces of their variables, with errors for the user."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError, DataError

Floats = npt.NDArray[np.floating[Any]]


class NetcdfFile:
    """A NetCDF file that is open for reading.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            ConfigError: the netCDF4 package is not installed.
            DataError: there is no such file, or it is damaged or no NetCDF.
        """
        self.path = path
        if not path.is_file():
            raise DataError(f"{path}: there is no such file")
        with _readable(path):
            self._data = netcdf4().Dataset(path, "r")

    def close(self) -> None:
        """Close it."""
        self._data.close()

    @property
    def names(self) -> list[str]:
        """Of all variables."""
        return list(self._data.variables)

    @property
    def chunk_rows(self) -> int:
        """Rows of the first two dims of a field that are stored together; 1 if not chunked."""
        for variable in self._data.variables.values():
            chunks = variable.chunking()
            if len(variable.dimensions) == 3 and isinstance(chunks, list):
                return int(chunks[-2] if variable.dimensions[0] == "time" else chunks[0])
        return 1

    def size(self, dim: str) -> int:
        """The length of a dim; 1 if there is none of that name."""
        return len(self._data.dimensions[dim]) if dim in self._data.dimensions else 1

    def dims(self, name: str) -> dict[str, int]:
        """Names and sizes of a variable's dims.

        Raises:
            DataError: there is no such variable; the message has those there are.
        """
        if name not in self._data.variables:
            raise DataError(self.missing(name))
        variable = self._data.variables[name]
        return dict(zip(variable.dimensions, map(int, variable.shape), strict=True))

    def missing(self, name: str) -> str:
        """The message for a variable that is not there."""
        names = self.names
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        return f"{self.path}: has no variable {name}{hint} (it has {', '.join(names) or 'none'})"

    def unit(self, name: str) -> str | None:
        """A variable's `units` attribute, None if it has none."""
        text = getattr(self._data.variables[name], "units", None)
        return None if text is None else str(text)

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ma.MaskedArray[Any, Any]:
        """A piece of a variable; missing values are masked, NaN is not.

        Raises:
            DataError: the file is damaged there.
        """
        variable = self._data.variables[name]
        with _readable(self.path), warnings.catch_warnings():
            # The library does not use a missing_value of another precision; see below.
            warnings.simplefilter("ignore", UserWarning)
            found = np.ma.asarray(variable[index])
        missing = getattr(variable, "missing_value", None)
        if missing is not None and np.asarray(missing).dtype != found.dtype:
            found = np.ma.masked_equal(found, np.asarray(missing).astype(found.dtype))
        return found

    def time(self, index: int = 0) -> str:
        """The time of the fields, as text; empty if the file does not say."""
        variable = self._data.variables.get("time")
        if variable is None:
            return ""
        value = np.ma.asarray(self.read("time", (...,))).reshape(-1)  # type: ignore[arg-type]
        if index >= value.size or np.ma.getmaskarray(value)[index]:
            return ""
        return f"{float(value[index]):.10g} {getattr(variable, 'units', '')}".rstrip()


def netcdf4() -> Any:
    """The netCDF4 package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import netCDF4
    except ImportError as error:
        raise ConfigError(
            'NetCDF files need the netCDF4 package: pip install "lockstep-train[ufs]"'
        ) from error
    return netCDF4


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what the library says of a damaged file into one message."""
    try:
        yield
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (OSError, RuntimeError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path}: is not NetCDF, or is truncated or damaged ({detail}); get the file again"
        ) from error
