"""Files of rows and pictures that survive a full disk, a kill and a resumed run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from lockstep.config.files import open_regular, open_to_read, replacing_binary
from lockstep.engine.events import PICTURES, Event, Logged, RunStarted, picture_path
from lockstep.errors import RunDirectoryError, file_errors
from lockstep.observe.sink import RowsLeftOut, Sink
from lockstep.observe.text import count


def opening(path: Path) -> AbstractContextManager[None]:
    """Turns an error while `path` is opened into one clear message.

    Raises:
        RunDirectoryError: the file cannot be created, read or written.
    """
    advice = "make its directory writable or choose another run directory"
    return file_errors(RunDirectoryError, path, "opened for writing", advice)


def end_of_rows(path: Path) -> int:
    """Bytes up to the end of the last whole line; 0 if there is none.

    Raises:
        OSError: the file exists but cannot be read.
    """
    block = 1 << 16
    try:
        with open_to_read(path) as file:
            end = os.fstat(file.fileno()).st_size
            while end > 0:
                start = max(0, end - block)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
                end = start
    except FileNotFoundError:
        pass
    return 0


MOST_WAITING = 8 << 20
"""Bytes that wait at most for a file; all, and what `EventHub` keeps, take less than 64 MiB."""


class AppendFile:
    """Appends whole rows to a file; when `append` returns, the operating system has them.

    Opening truncates a line that a killed process has left half-written. Bytes that cannot be
    written, as on a full disk, are kept, and written first once there is space, from the very byte
    at which the disk was full: no row is torn or doubled. None is lost, unless `MOST_WAITING` bytes
    wait: those that come then are left out, and counted.

    Args:
        path: path of the file; it and its directory are created if they do not exist.

    Attributes:
        num_left_out: rows that are left out, until that is said.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_left_out = 0
        self._pending = bytearray()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        end = end_of_rows(path)
        if end != os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, end)

    @property
    def is_waiting(self) -> bool:
        """Whether there is something that could not be written yet."""
        return bool(self._pending)

    def append(self, row: bytes) -> None:
        """Write a row, after what is still kept.

        Raises:
            OSError: not all could be written; the rest is kept, or this row is left out.
        """
        if self._pending and len(self._pending) + len(row) > MOST_WAITING:
            try:
                self._write()
            except OSError:
                self.num_left_out += 1
                raise
        self._pending += row
        self.flush()

    def flush(self) -> None:
        """Write what is kept.

        Raises:
            RowsLeftOut: all of it is written, but it lacks rows.
            OSError: not all could be written; the rest is kept.
        """
        if self._pending:
            self._write()
        if self.num_left_out:
            number, self.num_left_out = self.num_left_out, 0
            raise RowsLeftOut(self.path, number)

    def _write(self) -> None:
        # Writing to a deleted file succeeds, and all of it is gone at closing.
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(
                errno.ENOENT, "deleted while the run writes to it", str(self.path)
            )
        try:
            while self._pending:
                del self._pending[: os.write(self._fd, self._pending)]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Write what is kept and close the file, once.

        Raises:
            OSError: what is kept could not be written and is lost.
        """
        if self._fd < 0:
            return
        try:
            self.flush()
        except OSError as error:
            if self.num_left_out:
                left_out = count(self.num_left_out, "row")
                error.strerror = f"{error.strerror}, and {left_out} had to be left out"
            raise
        finally:
            os.close(self._fd)
            self._fd = -1


_FILE = re.compile(r"(\d{8,})\.png")
MOST_PICTURES = 16
"""Of those that are not stored yet, so many are kept."""


class Pictures(Sink):
    """Writes each picture completely or not at all; one that comes again replaces the first.

    When a run resumes from step k, as `RunStarted` says, pictures of later steps are removed: they
    come again. Of pictures that cannot be written, the newest few are kept for the next event.

    Args:
        run_dir: path of the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._waiting: dict[str, bytes] = {}

    def __call__(self, event: Event) -> None:
        """Write the picture of a `Logged`; with `RunStarted`, remove those of later steps."""
        if isinstance(event, RunStarted) and not event.continued:
            self._cut(event.step)
        elif isinstance(event, Logged) and event.png:
            if len(self._waiting) >= MOST_PICTURES:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[picture_path(event.name, event.step)] = event.png
        self._write()

    def close(self) -> None:
        """Write what is kept."""
        self._write()

    def _write(self) -> None:
        for path, png in list(self._waiting.items()):
            file = self._run_dir / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing_binary(file) as binary:
                binary.write(png)
            del self._waiting[path]

    def _cut(self, last_step: int) -> None:
        self._waiting.clear()
        for path, step in pictures_of(self._run_dir):
            if step > last_step:
                path.unlink()


def pictures_of(run_dir: Path) -> Iterator[tuple[Path, int]]:
    """The pictures in a run directory, each with its step."""
    for path in (run_dir / PICTURES).rglob("*.png"):
        found = _FILE.fullmatch(path.name)
        if found:
            yield path, int(found[1])
