"""Files with the newest calls of ranks, for when one of them was lost or hangs.

```
flight/slot_N.calls          written by the process when a call has failed, or by its watchdog
flight/waiting_slot_N.calls  written by the watchdog of one that waits for long, as long as it does
flight/0001/slot_N.calls     of a loss after which the others went on, or of an earlier sitting
```
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.comm.call_records import CallLog, read_calls
from lockstep.errors import DataError
from lockstep.files import leftovers, replacing_binary

FLIGHT = "flight"
"""Folder in the run directory."""

MOST_FILES = 1024
"""Files of one kind that are read; of more, those of the first slots."""

_KEPT = 3
_LOST = re.compile(r"slot_([0-9]{1,9})\.calls")
_WAITING = re.compile(r"waiting_slot_([0-9]{1,9})\.calls")
_OCCASION = re.compile(r"[0-9]{4,9}")


class FlightFolder:
    """The files of a run; all ranks, their watchdogs and readers use it.

    Args:
        run_dir: run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FLIGHT

    def lost_file(self, slot: int) -> Path:
        """The path for the calls of a process when it, or another one, is lost."""
        return self._path / f"slot_{slot}.calls"

    def waiting_file(self, slot: int) -> Path:
        """The path for the calls of a process that waits."""
        return self._path / f"waiting_slot_{slot}.calls"

    def keep(self, slot: int, calls: bytes) -> None:
        """Write down the calls of a process.

        It is not flushed to the disk: survivors of a loss should go on.

        Args:
            slot: lifelong number of the process.
            calls: content of the file, from `CallRing.copy`.

        Raises:
            OSError: it cannot be written.
        """
        self._path.mkdir(exist_ok=True)
        with replacing_binary(self.lost_file(slot), durable=False) as file:
            file.write(calls)

    def set_aside(self, gone: Iterable[int] = ()) -> None:
        """Put what is there into a folder of its own, and remove the oldest ones; of rank 0.

        Args:
            gone: lifelong numbers of processes that were lost, and wait no more.

        Raises:
            OSError: it cannot be done.
        """
        for slot in gone:
            self.waiting_file(slot).unlink(missing_ok=True)
        files = self._files(_LOST)
        if not files:
            return
        occasions = self._occasions()
        number = int(occasions[-1].name) + 1 if occasions else 1
        new = self._path / f"{number:04}"
        new.mkdir()
        for file in files.values():
            file.replace(new / file.name)
        for old in occasions[: 1 - _KEPT]:
            shutil.rmtree(old)

    def begin(self) -> None:
        """Set aside what an earlier sitting has left; of rank 0.

        Raises:
            OSError: it cannot be done.
        """
        if not self._path.is_dir():
            return
        self.set_aside()
        for path in (*self._files(_WAITING).values(), *leftovers(self._path)):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what survivors have written, since nobody was lost; of rank 0.

        Raises:
            OSError: it cannot be done.
        """
        for path in self._files(_LOST).values():
            path.unlink(missing_ok=True)

    def present(self) -> dict[int, CallLog]:
        """The calls of ranks that wait, or that a loss has ended which is not set aside.

        Files that are damaged are left out.

        Returns:
            For each slot, what is known of it.
        """
        files = self._files(_WAITING) | self._files(_LOST)
        logs: dict[int, CallLog] = {}
        for slot, path in files.items():
            with suppress(DataError):
                logs[slot] = read_calls(path)
        return logs

    def newest(self) -> dict[int, CallLog]:
        """As `present`, or if nothing is there, of the newest loss that was set aside.

        Raises:
            DataError: there are no files, or one of them is damaged.
        """
        files = self._files(_WAITING) | self._files(_LOST)
        occasions = [] if files else self._occasions()
        if occasions:
            files = _matching(occasions[-1], _LOST)
        if not files:
            raise DataError(
                f"{self._path}: holds no calls; they are written when a rank hangs or is lost"
            )
        return {slot: read_calls(path) for slot, path in files.items()}

    def _files(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        return _matching(self._path, pattern)

    def _occasions(self) -> list[Path]:
        """Folders of earlier losses, the oldest first."""
        found = [name for name in _names(self._path) if _OCCASION.fullmatch(name)]
        return [self._path / name for name in sorted(found, key=int)]


def _matching(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """The files of a pattern by slot; of very many, the first ones."""
    found = [match for match in map(pattern.fullmatch, _names(folder)) if match]
    slots = sorted((int(match[1]), match[0]) for match in found)
    return {slot: folder / name for slot, name in slots[:MOST_FILES]}


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
