"""Ends of the logs that the processes of a run have written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.files import open_to_read

_TAIL_BYTES = 64 << 10
_OUTPUT = "ranks.log"
_HANG = re.compile(r"hang_of_slot_[0-9]{1,9}\.json")


def log_names(run_dir: Path) -> list[str]:
    """The logs that are there: what ranks said, and where those that hung stood."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        return []
    return sorted((n for n in names if n == _OUTPUT or _HANG.fullmatch(n)), key=_place)


def read_log(run_dir: Path, name: str) -> dict[str, Any]:
    """The end of a log.

    Args:
        run_dir: run directory.
        name: one of `log_names`; anything else is refused.

    Raises:
        RunDirectoryError: there is no such log, or it cannot be read.
    """
    if name not in log_names(run_dir):
        raise RunDirectoryError("there is no such log")
    path = run_dir / name
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read(_TAIL_BYTES)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from None
    if start:
        data = data.partition(b"\n")[2] or data
    return {"name": name, "size": size, "is_cut": start > 0, "text": data.decode(errors="replace")}


def _place(name: str) -> tuple[bool, int, str]:
    return name != _OUTPUT, len(name), name
