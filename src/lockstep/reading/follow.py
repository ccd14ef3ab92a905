"""A run directory read again and again, each time from where the last reading ended."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import RunDirectoryError
from lockstep.files import MAX_TEXT_BYTES, open_regular, open_to_read
from lockstep.parsing import parse_object
from lockstep.reading.history import History

EVENTS = "events.jsonl"
IDENTITY = "run.json"


class RunReader:
    """Keeps a run's history up to date.

    Attributes:
        run_dir: of the run.
        history: what its events tell; another object after the file was replaced.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._forget()

    def _forget(self) -> None:
        self.history = History()
        self._offset, self._file_number, self._newest = 0, 0, b""
        self._is_within = False  # a row that is too long, of which a part has been read

    def poll(self) -> bool:
        """Read what has been written since the last call; returns whether there was anything.

        Raises:
            RunDirectoryError: the file is there, but cannot be read at all.
        """
        path = self.run_dir / EVENTS
        try:
            with open_to_read(path) as file:
                status = os.fstat(file.fileno())
                is_same = status.st_ino == self._file_number
                if not (is_same and is_continued(file, self._offset, self._newest)):
                    self._forget()
                    self._file_number = status.st_ino
                file.seek(self._offset)
                before = self._offset
                # A last line that is not yet whole is read next time.
                while (line := file.readline(MAX_TEXT_BYTES)).endswith(b"\n") or (
                    len(line) == MAX_TEXT_BYTES
                ):
                    self._take(line)
                    self._offset += len(line)
                    self._newest = line
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error
        return self._offset != before

    def _take(self, line: bytes) -> None:
        is_rest, self._is_within = self._is_within, not line.endswith(b"\n")
        if is_rest:
            return
        if self._is_within:
            self.history.add_problem(
                f"{EVENTS}: byte {self._offset}: a row of more than {MAX_TEXT_BYTES:,} bytes is "
                "left out"
            )
            return
        try:
            row = parse_object(line)
        except ValueError as error:
            self.history.add_problem(f"{EVENTS}: byte {self._offset}: is not JSON: {error}")
        else:
            self.history.add(row)


def is_continued(file: BinaryIO, offset: int, newest: bytes) -> bool:
    """Whether a file still has what was last read of it: numbers of removed ones are given again.

    Args:
        file: to look at.
        offset: bytes that have been read.
        newest: the last ones of them.

    Raises:
        OSError: the file cannot be read.
    """
    file.seek(offset - len(newest))
    return file.read(len(newest)) == newest


def read_run(run_dir: Path) -> History:
    """All that the events of a run tell.

    Raises:
        RunDirectoryError: there are none, or they cannot be read at all.
    """
    reader = RunReader(run_dir)
    if not reader.poll() and not any((run_dir / name).exists() for name in (EVENTS, IDENTITY)):
        raise RunDirectoryError(f"{run_dir}: is no run directory (no {EVENTS})")
    return reader.history


def is_claimed(run_dir: Path) -> bool:
    """Whether a process of this machine, or of one that shares its locks, trains in a folder.

    Asks who has the lock without taking it, which would keep a run from starting. A process that
    trains must not ask for its own folder: POSIX gives its lock up when the file is closed.
    """
    query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        descriptor = open_regular(run_dir / ".lock")
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, query)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return bool(struct.unpack("hhqqi", answer[: struct.calcsize("hhqqi")])[0] != fcntl.F_UNLCK)
