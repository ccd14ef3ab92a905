"""Not waiting for ever for a library that damaged files send in circles.

HDF5 follows some damaged files without an end, deaf to signals. So it works in a thread of its own
while this one watches how long it computes. Waiting for a slow disk does not count.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_CPU_S = 5.0
"""Processor time that opening a file or reading one piece may take; they take milliseconds."""

_LOOK_S = 0.5
_MAPS = Path("/proc/self/maps")


class Endless(Exception):
    """A call into a library has computed for too long."""


def within_patience(call: Callable[[], Any]) -> Any:
    """The result of a call that lets go of the interpreter's lock while it works.

    Raises:
        Endless: it has taken more than `MOST_CPU_S`. Its thread cannot be ended and works on until
            the process ends.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # raised again where it is waited for
            outcome["error"] = error

    thread = threading.Thread(target=work, name="netcdf", daemon=True)
    thread.start()
    while True:
        thread.join(_LOOK_S)
        if not thread.is_alive():
            break
        if _cpu_s(thread) > MOST_CPU_S:
            raise Endless(f"the library has computed for {MOST_CPU_S:g} s without an end")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def check_opens(path: str) -> None:
    """Open a NetCDF file and ask about its variables, as the netCDF4 package does at first.

    The package, which must be imported, would keep the interpreter's lock. Errors are left to it.
    Where its C library cannot be found, nothing is done.

    Args:
        path: absolute.

    Raises:
        Endless: it does not come back.
    """
    library = _library()
    if library is None:
        return

    def look_through() -> None:
        number, num_variables = ctypes.c_int(), ctypes.c_int()
        name = path.encode(errors="surrogateescape")
        if library.nc_open(name, 0, ctypes.byref(number)) != 0:
            return
        library.nc_inq(number, None, ctypes.byref(num_variables), None, None)
        for variable in range(num_variables.value):
            # Reads what the file says of the variable, its attributes included.
            library.nc_inq_var(number, variable, None, None, None, None, None)
        library.nc_close(number)

    within_patience(look_through)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library that the netCDF4 package has loaded."""
    try:
        paths = re.findall(r"(/\S*/libnetcdf[^/\s]*\.so\S*)", _MAPS.read_text())
    except OSError:
        return None
    return ctypes.CDLL(paths[0]) if paths else None


def _cpu_s(thread: threading.Thread) -> float:
    """Processor time of a thread so far; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:  # it has ended
        return 0.0
