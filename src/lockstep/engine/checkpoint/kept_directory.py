"""Restoring a run directory after a start that was refused.

Ranks write why they refuse a start to files of the run directory, where the launcher reads it. So
the files from before are kept in memory, and restored at the end, unless a run was started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.config.files import open_regular, replacing_binary
from lockstep.engine.checkpoint.listing import own_entries
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import LockstepError

_EVENTS = "events.jsonl"
_STARTED = b'"event": "RunStarted"'
_MOST_BYTES = 4 << 20
"""Size up to which a file's content is kept; larger ones are only truncated to their size."""
_APPENDED_ONLY = ("checkpoints", "tensorboard", "trackers", "logged", "profile")
"""Folders of which no content is kept: a start only adds files to them."""


@contextmanager
def kept_if_refused(run_dir: Path) -> Iterator[KeptDirectory]:
    """Restore a run directory after the block, unless a run was started in it.

    New files and folders are removed. Nothing is changed while another job uses the directory.

    Args:
        run_dir: the run directory, which need not exist.
    """
    before = KeptDirectory(run_dir)
    try:
        yield before
    finally:
        if not before.has_started():
            with suppress(OSError):
                before.put_back()


class KeptDirectory:
    """The content of a run directory at some time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._is_started = False
        above = [run_dir, *run_dir.parents]
        self._new_folders = [path for path in above if not os.path.exists(path)]
        self._paths = set(_all(run_dir))
        self._contents: dict[Path, bytes] = {}
        self._sizes: dict[Path, int] = {}
        for path in self._paths:
            with suppress(OSError):
                size = path.stat().st_size
                is_kept = path.relative_to(run_dir).parts[0] not in _APPENDED_ONLY
                if path.is_file() and not path.is_symlink():
                    self._sizes[path] = size
                    if is_kept and size <= _MOST_BYTES:
                        self._contents[path] = path.read_bytes()

    def note_started(self) -> None:
        """Note that a run was started here, even if the directory shows no sign of it."""
        self._is_started = True

    def has_started(self) -> bool:
        """Whether a run was started here since, by any process."""
        if self._is_started:
            return True
        checkpoints = (self._run_dir / "checkpoints").glob("*step_*")
        events = self._run_dir / _EVENTS
        try:
            # On a full disk there may be checkpoints without an event.
            if any(path not in self._paths for path in checkpoints):
                return True
            with os.fdopen(open_regular(events), "rb") as file:
                file.seek(self._sizes.get(events, 0))
                return any(_STARTED in line for line in file)
        except OSError:
            return False

    def put_back(self) -> None:
        """Restore the directory."""
        if not os.path.isdir(self._run_dir):
            return
        directory = RunDirectory(self._run_dir)
        try:
            directory.lock()
        except LockstepError:
            return  # another job uses it by now
        try:
            self._put_back()
        finally:
            directory.close()
            lock = self._run_dir / ".lock"
            if lock not in self._paths:
                lock.unlink(missing_ok=True)
            for folder in self._new_folders:
                with suppress(OSError):  # it has files of other programs
                    folder.rmdir()

    def _put_back(self) -> None:
        new = [path for path in _all(self._run_dir) if path not in self._paths]
        # Deepest first, so that folders are empty when they are removed.
        for path in sorted(new, key=lambda p: len(p.parts), reverse=True):
            if path.name == ".lock":
                continue
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
        for path, size in self._sizes.items():
            content = self._contents.get(path)
            with suppress(OSError):
                if content is None:
                    if path.stat().st_size > size:
                        os.truncate(path, size)
                elif not path.exists() or path.read_bytes() != content:
                    path.parent.mkdir(exist_ok=True)
                    with replacing_binary(path) as file:
                        file.write(content)


def _all(run_dir: Path) -> list[Path]:
    """All paths in it that Lockstep may have written; none if it cannot be read."""
    found: list[Path] = []
    with suppress(OSError):
        for entry in own_entries(run_dir):
            if entry.is_symlink() or entry.exists():
                found.append(entry)
                if entry.is_dir() and not entry.is_symlink():
                    found += entry.rglob("*")
    return found
