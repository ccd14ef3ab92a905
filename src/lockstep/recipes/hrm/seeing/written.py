"""The folder of a page: made or refused before anything is computed, written as a whole."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError
from lockstep.files import leftovers, replacing, replacing_binary

PAGE_FILE = "index.html"
ARRAYS_FILE = "predictions.npz"


@contextmanager
def folder_for_page(folder: Path) -> Iterator[None]:
    """Have a folder to write a page to; one that was made is gone if no page comes.

    Raises:
        ConfigError: it cannot be made, or has other files than those of a page.
    """
    was_there = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check(folder)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be made: {error.strerror}") from None
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise


def write(folder: Path, page: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> list[Path]:
    """Write a page and its arrays, both or neither; the same bytes from the same values.

    Raises:
        ConfigError: they cannot be written.
    """
    paths = [folder / PAGE_FILE, folder / ARRAYS_FILE]
    try:
        # Files of .npz are dated 1980, whenever they are written.
        with replacing(paths[0]) as text, replacing_binary(paths[1]) as binary:
            np.savez(binary, allow_pickle=False, **arrays)
            text.write(page)
            text.flush()
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error.strerror}") from None
    return paths


def _check(folder: Path) -> None:
    mine = {folder / PAGE_FILE, folder / ARRAYS_FILE}
    others = sorted(
        path.name
        for path in {*folder.iterdir()} - {*leftovers(folder)}
        if path not in mine or not stat.S_ISREG(path.lstat().st_mode)
    )
    if others:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise ConfigError(
            f"--output {folder}: holds what is not of a page ({names}); name a new folder"
        )
