"""The newest communication calls of ranks, saved when a rank is lost or hangs, and explained.

```
flight/slot_N.calls          written by the process when a call has failed, or by its watchdog
flight/waiting_slot_N.calls  written by the watchdog of one that waits for long, while it waits
flight/0001/slot_N.calls     of a loss after which the others went on, or of an earlier session
```
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from lockstep.comm.call_records import Call, CallLog, read_calls
from lockstep.config.files import leftovers, replacing_binary
from lockstep.engine.events import RankLost
from lockstep.errors import DataError

FLIGHT = "flight"
"""Folder in the run directory."""

MOST_FILES = 1024
"""Number of files of one kind that are read, those of the first slots."""
_KEPT = 3
_LOST = re.compile(r"slot_([0-9]{1,9})\.calls")
_WAITING = re.compile(r"waiting_slot_([0-9]{1,9})\.calls")
_OCCASION = re.compile(r"[0-9]{4,9}")

_MOST = 6
"""Number of ranks that a message lists."""

_ALIKE = ("all_gather", "broadcast")
"""Calls after which all ranks have the same number of bytes."""

Logs = Mapping[int, CallLog]
"""The newest calls of processes, by slot."""


class FlightFolder:
    """The files of a run, for all ranks, their watchdogs and readers.

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
        """Write the calls of a process.

        The file is not flushed to disk, so that survivors of a loss go on at once.

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
        """Move the files into a folder of their own, and remove the oldest folders; on rank 0.

        Args:
            gone: lifelong numbers of processes that were lost, and no longer wait.

        Raises:
            OSError: a file cannot be moved or removed.
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
        """Set aside the files of an earlier session; on rank 0.

        Raises:
            OSError: a file cannot be moved or removed.
        """
        if not self._path.is_dir():
            return
        self.set_aside()
        for path in (*self._files(_WAITING).values(), *leftovers(self._path)):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the files that ranks have written, since none was lost; on rank 0.

        Raises:
            OSError: a file cannot be moved or removed.
        """
        for path in self._files(_LOST).values():
            path.unlink(missing_ok=True)

    def present(self) -> dict[int, CallLog]:
        """The calls of ranks that wait, and of the newest loss if it is not set aside, by slot.

        Damaged files are left out.
        """
        files = self._files(_WAITING) | self._files(_LOST)
        logs: dict[int, CallLog] = {}
        for slot, path in files.items():
            with suppress(DataError):
                logs[slot] = read_calls(path)
        return logs

    def newest(self) -> dict[int, CallLog]:
        """As `present`; if there are no files, those of the newest loss that was set aside.

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
    """The files that match a pattern by slot; the first ones if there are very many."""
    found = [match for match in map(pattern.fullmatch, _names(folder)) if match]
    slots = sorted((int(match[1]), match[0]) for match in found)
    return {slot: folder / name for slot, name in slots[:MOST_FILES]}


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words: `rank 1`, `ranks 0, 2 and 3`."""
    shown = [f"{rank:,}" for rank in sorted(ranks)]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    if len(shown) > _MOST:
        shown = [*shown[: _MOST - 1], f"{len(shown) - _MOST + 1:,} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def named(call: Call, log: CallLog) -> str:
    """A call in words: `call 1,234 (all_gather)`."""
    ranks = log.ranks(call.group)
    if not call.is_message:
        of = "" if call.group == 0 else f" of {listed(ranks)}" if ranks else " of a subgroup"
        return f"call {call.number:,} ({call.kind}){of}"
    if call.peer < 0:
        return "the end of a message that it sent"
    if ranks is None or call.peer >= len(ranks):
        peer = f"place {call.peer:,} of a subgroup"
    else:
        peer = f"rank {ranks[call.peer]:,}"
    return f"message {call.number:,} {'to' if call.kind == 'send' else 'from'} {peer}"


def reached(log: CallLog) -> str:
    """The position of a process that has hung: `in step 57, after call 1,234 (all_gather)`."""
    step = f"in step {log.step + 1:,}"
    if log.stuck is not None:
        return f"{step}, in {named(log.stuck, log)}"
    if log.calls:
        return f"{step}, after {named(log.calls[-1], log)}"
    return f"{step}, before its first call"


def waits(logs: Logs, apart: Collection[int] = ()) -> list[tuple[list[int], str]]:
    """Who waits in which call.

    Args:
        logs: newest calls; those of groups of other sizes are left out.
        apart: slots of those that hang.

    Returns:
        Ranks that wait in the same call, and the call in words.
    """
    sizes = [logs[slot].size for slot in apart if slot in logs] or [
        log.size for log in logs.values()
    ]
    found: list[tuple[str, int]] = []
    for slot, log in logs.items():
        if slot not in apart and log.size == sizes[0] and log.stuck is not None:
            found.append((named(log.stuck, log), log.rank))
    groups = groupby(sorted(found), key=lambda pair: pair[0])
    pairs = [(sorted(rank for _, rank in members), name) for name, members in groups]
    return sorted(pairs)


def waiting(logs: Logs, hung: Collection[int]) -> str:
    """Who waited for those that hung: `ranks 0 and 2 waited for it in call 1,235 (all_gather)`.

    Args:
        logs: newest calls.
        hung: slots of those that hung.

    Returns:
        Empty if nobody is known to have waited.
    """
    parts = [f"{listed(ranks)} waited for it in {call}" for ranks, call in waits(logs, hung)]
    return ", ".join(parts[:_MOST])


def difference(logs: Logs) -> str:
    """The first call that ranks of a group have made differently; empty if they have not.

    Args:
        logs: newest calls.
    """
    groups: dict[tuple[int, int, tuple[int, ...]], dict[int, dict[int, Call]]] = {}
    for log in logs.values():
        for call in log.until_stuck:
            ranks = log.ranks(call.group)
            # A group is identified by its first and last rank: all its ranks would take long.
            if ranks is None or call.is_message:
                continue
            key = (log.size, call.group, (ranks[0], ranks[-1], len(ranks)))
            groups.setdefault(key, {}).setdefault(log.rank, {})[call.number] = call
    for _, calls in sorted(groups.items()):
        if found := _first_difference(calls):
            return found
    return ""


def _first_difference(calls: Mapping[int, Mapping[int, Call]]) -> str:
    """The first number whose call differs between ranks.

    Args:
        calls: for each rank of a group, its calls by number.
    """
    first = max(min(numbers) for numbers in calls.values())
    last = min(max(numbers) for numbers in calls.values())
    for number in range(first, last + 1):
        by_call: dict[str, list[int]] = {}
        for rank, numbers in calls.items():
            if number in numbers:
                by_call.setdefault(_described(numbers[number]), []).append(rank)
        if len(by_call) > 1:
            parts = sorted((sorted(ranks), call) for call, ranks in by_call.items())
            return f"call {number:,} is " + ", ".join(
                f"{call} on {listed(ranks)}" for ranks, call in parts[:_MOST]
            )
    return ""


def _described(call: Call) -> str:
    return f"{call.kind} of {call.taken:,} bytes" if call.kind in _ALIKE else call.kind


def losses(
    step: int, lost: Mapping[int, int], reasons: Mapping[int, str], logs: Logs
) -> list[RankLost]:
    """An event for each process that was lost.

    Args:
        step: committed steps.
        lost: the rank of each, by slot.
        reasons: why its watchdog ended it, by slot; empty if it did not.
        logs: newest calls.
    """
    hung = {slot for slot in lost if reasons[slot]}
    return [_loss(step, slot, rank, reasons[slot], logs, hung) for slot, rank in lost.items()]


def unreported(logs: Logs, reasons: Mapping[int, str]) -> list[RankLost]:
    """Processes that have hung, and after whose end the others could not go on.

    Args:
        logs: newest calls.
        reasons: why watchdogs ended processes, by slot.
    """
    hung = {slot for slot in logs if reasons.get(slot)}
    return [
        _loss(logs[slot].step, slot, logs[slot].rank, reasons[slot], logs, hung)
        for slot in sorted(hung)
    ]


def _loss(step: int, slot: int, rank: int, reason: str, logs: Logs, hung: set[int]) -> RankLost:
    if slot not in hung or slot not in logs:
        return RankLost(step=step, slot=slot, rank=rank, reason=reason)
    return RankLost(
        step=step,
        slot=slot,
        rank=rank,
        reason=reason,
        reached=reached(logs[slot]),
        waiting=waiting(logs, hung),
    )
