"""Why a run is slow, or has ended: causes by what they cost, each with what it was seen by.

Here is what they are based on: the newest session in numbers, and the newest calls of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from lockstep.engine.call_history import FLIGHT, Logs, unreported
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import Event, RankLost, RunStarted
from lockstep.observe.reading.history import History, Process
from lockstep.observe.reading.listing import Summary


@dataclass(frozen=True)
class Cause:
    """Why a run is slower than it could be, or has ended.

    Attributes:
        name: a word for programs.
        weight: its weight among causes, from 0 to 1; 1 for what has ended the run.
        sentence: what it is.
        evidence: the measurements that show it.
        advice: what to do, with the key of the config if there is one.
        explains: names of causes that are only its effects.
        lost: share of the session that it has cost, from 0 to 1; None if that was not measured.
    """

    name: str
    weight: float
    sentence: str
    evidence: Sequence[str]
    advice: str
    explains: Sequence[str] = field(default=())
    lost: float | None = None

    @property
    def headline(self) -> str:
        """The sentence, with the part of the session that it has cost."""
        return self.sentence + ("" if self.lost is None else f" ({percent(self.lost)} of the time)")


def percent(part: float) -> str:
    """A share as `31 %`."""
    return f"{100 * part:.0f} %"


def measured(name: str, lost: float, sentence: str, evidence: Sequence[str], advice: str) -> Cause:
    """A cause whose weight is the share of the session that it has cost."""
    return Cause(name, lost, sentence, evidence, advice, lost=lost)


_IN_ORDER = ("completed", "stopped", "new")
"""States of runs in which no rank waits or has failed."""
_FILES = ((FLIGHT, ".calls"), ("", ".json"))
"""Folders in a run directory, and the suffixes of the files in them that calls are read from."""

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Calls:
    """The newest calls of ranks that are waiting, or that could not continue after a loss.

    Attributes:
        logs: the calls by slot.
        hung: the processes that hung, even if no rank was left to report it.
    """

    logs: Logs = field(default_factory=dict)
    hung: Sequence[RankLost] = ()


def calls_of(summary: Summary) -> Calls:
    """Read the calls of a run's ranks, which takes milliseconds for each rank."""
    if summary.state in _IN_ORDER:
        return Calls()
    directory = RunDirectory(summary.path)
    logs = directory.flight.present()
    reasons = {slot: directory.hang_reason(slot) for slot in logs}
    return Calls(logs, unreported(logs, reasons))


def signature_of(summary: Summary) -> Signature:
    """Differs from before if `calls_of` would read something else."""
    found: list[tuple[str, int, int, int]] = []
    for folder, suffix in _FILES if summary.state not in _IN_ORDER else ():
        with suppress(OSError), os.scandir(summary.path / folder) as entries:
            for entry in entries:
                if entry.name.endswith(suffix):
                    status = entry.stat()
                    found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class NewestSession:
    """A run's newest session in numbers.

    Attributes:
        history: events of the run.
        config: config of the run, by dotted keys.
        state: state of the run, as in `lockstep.observe.reading.listing.Summary`.
        calls: newest calls of its ranks.
    """

    history: History
    config: Mapping[str, Any]
    state: str
    calls: Calls

    def events(self, kind: type[E]) -> list[E]:
        """The events of a kind in this session, in order."""
        happened = self.history.happenings[self.history.first_of_session :]
        return [h.event for h in happened if isinstance(h.event, kind)]

    @cached_property
    def lost(self) -> list[RankLost]:
        """The processes that were lost in this session, even if no rank was left to report it."""
        reported = self.events(RankLost)
        known = {one.slot for one in reported}
        return reported + [one for one in self.calls.hung if one.slot not in known]

    @cached_property
    def seconds(self) -> float:
        """From the start of training to the newest event; at least a millisecond."""
        start = self.history.started
        for happening in self.history.happenings:
            if isinstance(happening.event, RunStarted) and not happening.event.continued:
                start = happening.time
        return max(1e-3, self.history.newest - start)

    @cached_property
    def workers(self) -> list[Process]:
        """The processes that compute microbatches and have reported their times."""
        living = self.history.living
        return [p for p in living if p.num_microbatches and sum(p.seconds.values())]

    def share(self, kind: str) -> float:
        """The share of the session that workers have spent on a kind of work: their mean."""
        if not self.workers:
            return 0.0
        return sum(p.seconds[kind] for p in self.workers) / len(self.workers) / self.seconds

    def worst(self, kind: str) -> tuple[Process, float, float]:
        """The worker that has spent most on a kind of work.

        Returns:
            The worker, its share of the session, and the median share of the others; 0 without any.
        """
        one = max(self.workers, key=lambda p: p.seconds[kind])
        others = [p.seconds[kind] / self.seconds for p in self.workers if p is not one]
        return one, one.seconds[kind] / self.seconds, median(others) if others else 0.0

    @property
    def on_cpu(self) -> bool:
        """Whether all ranks compute on cores of their hosts."""
        return all(process.joined.device == "cpu" for process in self.history.living)

    @cached_property
    def hosts(self) -> dict[str, tuple[int, int]]:
        """The threads of all ranks and the cores that they may use, by host, if both are known."""
        found: dict[str, tuple[int, int]] = {}
        for process in self.history.living:
            joined = process.joined
            threads, cores = found.get(joined.host, (0, 0))
            found[joined.host] = (threads + joined.threads, max(cores, joined.cores))
        return {host: pair for host, pair in found.items() if pair[1]}
