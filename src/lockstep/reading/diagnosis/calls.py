"""What a diagnosis is given of the newest calls of ranks, which takes long to read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import RankLost
from lockstep.engine.flight.folder import FLIGHT
from lockstep.engine.flight.losses import unreported
from lockstep.engine.flight.story import Logs
from lockstep.reading.listing import Summary

_IN_ORDER = ("completed", "stopped", "new")
"""States of runs in which no rank waits, nor could not go on."""
_PARTS = ((FLIGHT, ".calls"), ("", ".json"))
"""Folders in a run directory, and what the names of files end with that calls are read from."""

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Calls:
    """The newest calls of ranks that wait now, or that could not go on after a loss.

    Attributes:
        logs: they, by slot.
        hung: the processes among them that hung, whether or not anybody was left to report it.
    """

    logs: Logs = field(default_factory=dict)
    hung: Sequence[RankLost] = ()


def calls_of(summary: Summary) -> Calls:
    """Read the calls of a run's ranks: milliseconds for each of them.

    Args:
        summary: of the run.
    """
    if summary.state in _IN_ORDER:
        return Calls()
    directory = RunDirectory(summary.path)
    logs = directory.flight.present()
    reasons = {slot: directory.hang_reason(slot) for slot in logs}
    return Calls(logs, unreported(logs, reasons))


def signature_of(summary: Summary) -> Signature:
    """What is another one once `calls_of` would read something else.

    Args:
        summary: of the run.
    """
    if summary.state in _IN_ORDER:
        return ()
    return tuple(sorted(_files(summary.path)))


def _files(run_dir: Path) -> Iterator[tuple[str, int, int, int]]:
    for folder, ending in _PARTS:
        try:
            with os.scandir(run_dir / folder) as entries:
                for entry in entries:
                    if entry.name.endswith(ending):
                        status = entry.stat()
                        yield entry.name, status.st_ino, status.st_size, status.st_mtime_ns
        except OSError:
            continue
