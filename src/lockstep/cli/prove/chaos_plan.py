"""The faults of a run: drawn from a seed, and distributed over its sessions."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from lockstep.engine.faults import MOMENTS, Kind, Moment, PlannedFault
from lockstep.errors import ConfigError
from lockstep.parallel.mesh import Mesh, rearranged

What = Literal[
    "kill",
    "stop",
    "raise",
    "slow",
    "preempt",
    "job",
    "corrupt",
    "worker",
    "disk",
    "edit",
    "start",
    "reader",
    "directory",
]
"""A kind of `PlannedFault`; every process killed; that, and the newest checkpoint damaged; a
process that fetches data killed; a disk that stands still while a checkpoint is written; a process
killed, and the one in its place given an edited script; a process killed while ranks start; a
reader of standard output that stands still while a process prints; the run directory moved away,
which ends the session: the next one goes on in the directory beside it."""

_WEIGHTS: dict[What, int] = {
    "kill": 10, "stop": 2, "raise": 2, "slow": 2, "preempt": 2, "job": 1, "corrupt": 2,
    "worker": 4, "disk": 1, "edit": 2, "start": 10, "reader": 2, "directory": 2,
}  # fmt: skip
"""Relative frequency of each kind of fault."""

_KINDS: dict[What, Kind] = {
    "raise": "raise",
    "slow": "slow",
    "reader": "print",
    "directory": "move",
}
"""Faults in the middle of computing that end no process at once."""

HANG_TIMEOUT_S = 2.0
"""Timeout of the watchdogs of all runs with faults, in seconds."""

STALL_S = 3 * HANG_TIMEOUT_S
"""How long disks and readers stand still, in seconds."""

_IN_COMPUTING: tuple[Moment, ...] = ("forward", "backward", "compute")
_OF_SPARES: tuple[Moment, ...] = ("reduce", "reduced", "optimizer", "committed")
"""Moments of ranks that compute no microbatches."""
_WITH_WORKERS: tuple[Moment, ...] = (*_IN_COMPUTING, "reduce", "reduced")
_IN_RECOVERY: tuple[Moment, ...] = ("regroup", "catch_up")
_AT_START: tuple[Moment, ...] = ("start", "met", "ready")

_OUTSIDE: tuple[Moment, ...] = (*_IN_RECOVERY, *_AT_START, "join")
"""Moments outside of a step."""

_MOST_DELAY_S = 0.01
_MOST_DELAY_AT_START_S = 0.2
"""About what it takes to assemble a training."""

_APART = 8
"""Steps between exceptions: a second one in the same step ends a run, and the death of a worker is
noticed some steps later."""


@dataclass(frozen=True)
class Incident:
    """Something that goes wrong at one time: one fault, or several that belong together.

    Attributes:
        what: kind of the fault.
        step: number of the step at about which it strikes.
        faults: its faults, of one or several processes.
    """

    what: What
    step: int
    faults: tuple[PlannedFault, ...]

    @property
    def ends_session(self) -> bool:
        """Whether the ranks have to be started again afterwards."""
        return self.what in ("preempt", "job", "corrupt", "directory")

    @property
    def ends_ranks(self) -> bool:
        """Whether it ends the processes that it strikes, or has them ended."""
        return self.what in ("kill", "stop", "edit", "start", "job", "corrupt")


@dataclass(frozen=True)
class Group:
    """The ranks that faults strike.

    Attributes:
        num_ranks: number of ranks at the start of each session, at least 2.
        replacements: greatest number of processes that join later in each session.
        has_workers: whether ranks have processes that fetch data for them.
        tp: number of ranks that share out the shards of a stage.
        pp: number of stages.
        moments: moments that ranks reach when nothing goes wrong.
    """

    num_ranks: int
    replacements: int = 0
    has_workers: bool = False
    tp: int = 1
    pp: int = 1
    moments: Collection[Moment] = MOMENTS


@dataclass
class Draw:
    """Draws incidents that leave at least one process alive or end the session."""

    group: Group
    source: random.Random
    moments: tuple[Moment, ...]
    alive: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    last_kill: int | None = None
    last_exception: int | None = None
    is_edited: bool = False
    is_starting: bool = False
    first_step: int = 0

    def begin_session(self, step: int) -> None:
        """Begin a session: all processes are alive, and go on from about this step."""
        self.is_starting, self.first_step = True, step
        self.alive = list(range(self.group.num_ranks))
        self.columns = [rank % self._num_columns for rank in self.alive]
        self.last_kill = self.last_exception = None
        self.is_edited = False

    @property
    def _num_columns(self) -> int:
        return self.group.tp * self.group.pp

    def _victims(self, what: What) -> list[int]:
        """Slots that a incident can strike."""
        mortal, computing = self._mortal(), self._computing()
        if what == "kill":
            return mortal
        return [s for s in mortal if s in computing] if what in ("stop", "edit") else computing

    def _what(self, step: int) -> What:
        """A kind of incident that is possible now."""
        weights = dict(_WEIGHTS)
        if not self.group.has_workers:
            del weights["worker"]
        if not self.group.replacements or self.is_edited:
            del weights["edit"]
        if not self.is_starting:
            del weights["start"]
        what = self.source.choices(list(weights), list(weights.values()))[0]
        if what in ("raise", "worker"):
            if self.last_exception is not None and step - self.last_exception < _APART:
                return "slow"
            self.last_exception = step
        is_fatal = what in ("kill", "stop", "edit")
        return "job" if is_fatal and not self._victims(what) else what

    def _mortal(self) -> list[int]:
        """Living processes whose part of the model others hold too."""
        return [
            slot
            for slot, column in zip(self.alive, self.columns, strict=True)
            if self.columns.count(column) > 1
        ]

    def _computing(self) -> list[int]:
        """Living processes that compute microbatches; the others are spares."""
        spares = Mesh(1, tuple(self.columns), self.group.tp, self.group.pp).incomplete
        return [slot for rank, slot in enumerate(self.alive) if rank not in spares]

    def _dies(self, slot: int) -> None:
        """Take a process out; another one may move to its column."""
        index = self.alive.index(slot)
        del self.alive[index], self.columns[index]
        self.columns = list(rearranged(self.columns, self._num_columns))

    def incident(self, step: int) -> Incident:
        """A incident at a step."""
        what = self._what(step)
        self.is_starting = False
        if what == "start":
            return Incident(what, self.first_step, (self._start(),))
        if what in ("job", "corrupt"):
            # Also of ranks that should be dead: the moment of their fault may be still to come.
            slots = range(self.group.num_ranks + self.group.replacements)
            faults = tuple(PlannedFault(slot, step, "committed") for slot in slots)
            return Incident(what, step, faults)
        fatal = what in ("kill", "stop", "edit")
        slot = self.source.choice(self._victims(what))
        if what == "preempt":
            fault = PlannedFault(slot, step, "committed", "preempt")
        elif what == "kill":
            fault = self._kill(slot, step)
        elif what == "stop":
            fault = PlannedFault(slot, step, "compute", "stop")
        elif what == "worker":
            fault = PlannedFault(
                slot, step, self.source.choice(_WITH_WORKERS), "worker", self._delay_s()
            )
        elif what == "disk":
            fault = PlannedFault(self.alive[0], step, "checkpoint", "slow", sleep_s=STALL_S)
        elif what == "edit":
            fault = PlannedFault(slot, step)
        else:
            moment = self.source.choice(_IN_COMPUTING)
            fault = PlannedFault(slot, step, moment, _KINDS[what])
        if fatal:
            self._dies(fault.slot)
            self.last_kill = step
        if what == "edit":
            self.is_edited = True
            joiner = PlannedFault(self.group.num_ranks, 0, "join", "edit")
            return Incident(what, fault.step, (fault, joiner))
        return Incident(what, fault.step, (fault,))

    def _start(self) -> PlannedFault:
        """The kill of any process before the first step: the others go on, or all start again."""
        slot = self.source.choice(self.alive)
        if slot in self._mortal():
            self._dies(slot)
        delay_s = self.source.choice((0.0, self.source.uniform(0, _MOST_DELAY_AT_START_S)))
        return PlannedFault(slot, 0, self.source.choice(_AT_START), "kill", delay_s)

    def _kill(self, slot: int, step: int) -> PlannedFault:
        source = self.source
        many = self.columns.count(self.columns[self.alive.index(slot)]) > 2
        many = many or self._num_columns == 1
        if self.last_kill is not None and source.random() < 0.25 and many:
            # Strikes while the others recover from the one before.
            return PlannedFault(slot, self.last_kill, source.choice(_IN_RECOVERY))
        if slot not in self._computing():
            return PlannedFault(slot, step, source.choice(_OF_SPARES), "kill", self._delay_s())
        moment = source.choice(self.moments)
        # Only rank 0 writes checkpoints: the first of those alive.
        if moment == "checkpoint":
            if self.alive[0] not in self._mortal():
                moment = "compute"
            else:
                slot = self.alive[0]
        return PlannedFault(slot, step, moment, "kill", self._delay_s())

    def _delay_s(self) -> float:
        return self.source.choice((0.0, self.source.uniform(0, _MOST_DELAY_S)))


def draw(num_incidents: int, num_steps: int, seed: int, group: Group) -> list[list[Incident]]:
    """The incidents of each session of a run.

    Args:
        num_incidents: number of incidents in all.
        num_steps: number of optimizer steps of the run.
        seed: seed that the plan is drawn with.
        group: ranks that the faults strike.

    Raises:
        ConfigError: the run has not enough steps.
    """
    if num_incidents > num_steps - 2:
        raise ConfigError(
            f"--faults {num_incidents}: a run of {num_steps} steps has room for "
            f"{max(num_steps - 2, 0)}; set steps= higher"
        )
    known = tuple(m for m in MOMENTS if m in group.moments and m not in _OUTSIDE)
    drawn = Draw(group, random.Random(seed), known)
    drawn.begin_session(0)
    sessions: list[list[Incident]] = [[]]
    for step in sorted(drawn.source.sample(range(1, num_steps - 1), num_incidents)):
        incident = drawn.incident(step)
        sessions[-1].append(incident)
        if incident.ends_session:
            sessions.append([])
            drawn.begin_session(step)
    return sessions
