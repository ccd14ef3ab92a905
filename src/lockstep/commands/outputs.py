"""Files that commands write at their end."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import DataError
from lockstep.files import create_beside


def check_writable(path: Path | None) -> None:
    """Make sure, before minutes are spent, that a file can be written; None is no file.

    Raises:
        DataError: it cannot.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "is a folder")
        temporary, descriptor = create_beside(path)
        os.close(descriptor)
        temporary.unlink()
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
