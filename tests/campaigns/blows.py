"""What a run with kills is: tasks, meshes, and which process is struck when, drawn from a seed."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STEPS, EVAL_EVERY, CHECKPOINT_EVERY = 48, 6, 5

KEYS = (
    f"steps={STEPS}", f"eval_every={EVAL_EVERY}", f"checkpoint.every={CHECKPOINT_EVERY}",
    "log_every=1", "digest_every=4", "clip_norm=1.0", "lr=0.01", "hang_timeout_s=3",
)  # fmt: skip

HANG_S = 3.0
"""`hang_timeout_s` of all runs."""

Phase = Literal["start", "step", "checkpoint", "evaluation", "end", "again"]
"""When a blow strikes; `again` is right after the one before."""

_TESTS = Path(__file__).parents[1]
_MODELS = _TESTS / "nn" / "models.py"
_SHARDS = ("num_shards=4", "batch_size=16", "num_microbatches=4", "eval_batch_size=4")
_ANY = ("none", "optimizer", "gradients", "parameters")

_START_S = 3.0
"""About what a start takes, in seconds."""

_DELAYS_S: dict[Phase, float] = {
    "start": _START_S, "step": 0.05, "checkpoint": 0.05, "evaluation": 0.08, "end": 0.3,
    "again": 3.0,
}  # fmt: skip
"""Greatest delay of a blow behind what it waits for."""

_PHASES: dict[Phase, int] = {
    "start": 6, "step": 3, "checkpoint": 3, "evaluation": 3, "end": 2, "again": 2,
}  # fmt: skip

_MOST_BLOWS = 3
"""Blows of a session: more could end all ranks once more than the launcher starts them again."""

_MOST_SESSIONS = 4

_AT_RANKS: dict[str, int] = {
    "KILL rank": 10, "STOP rank": 3, "PAUSE rank": 2, "TERM rank": 1, "INT rank": 1,
    "KILL ranks": 3, "KILL starter": 2, "KILL server": 3, "KILL proxy": 2, "KILL watchdog": 1,
}  # fmt: skip
_AT_ALL: dict[str, int] = {
    "KILL launcher": 4, "KILL all": 2, "TERM launcher": 2, "INT launcher": 1, "HUP launcher": 1,
    "PAUSE launcher": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        target: file and class.
        keys: of its config, beside `KEYS`.
        meshes: what `mesh.tp` and `mesh.pp` can be.
        sharding: what `sharding` can be.
    """

    target: str
    keys: tuple[str, ...] = ()
    meshes: tuple[tuple[int, int], ...] = ((1, 1),)
    sharding: tuple[str, ...] = ("none",)


TASKS = {
    "stages": Task(
        f"{_MODELS}:Deep", _SHARDS, ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4)), _ANY
    ),
    "shards": Task(f"{_MODELS}:Language", _SHARDS, ((1, 1), (2, 1), (3, 1), (4, 1)), _ANY[:-1]),
    "state": Task(
        f"{_TESTS / 'distributed' / 'tasks.py'}:Everything", ("teacher=true", "wide=500"),
        sharding=("none", "optimizer"),
    ),
    "carry": Task(f"{_TESTS / 'distributed' / 'carry_tasks.py'}:Read", ("eval_batch_size=20",)),
    "tables": Task(f"{_TESTS / 'distributed' / 'table_tasks.py'}:Look", ("eval_batch_size=4",)),
}  # fmt: skip


@dataclass(frozen=True)
class Blow:
    """A signal to some processes.

    Attributes:
        signum: signal that is sent; SIGSTOP for good.
        role: which processes get it.
        which: of these, the one at this part of them, from 0 to 1.
        phase: what it waits for.
        step: from which step on.
        delay_s: seconds that it then waits.
        pause_s: seconds after which the stopped process goes on; 0 for never.
    """

    signum: signal.Signals
    role: str
    which: float
    phase: Phase
    step: int
    delay_s: float
    pause_s: float = 0.0

    @property
    def is_for_many(self) -> bool:
        return self.role in ("ranks", "all")

    @property
    def word(self) -> str:
        return "PAUSE" if self.pause_s else self.signum.name.removeprefix("SIG")

    def __str__(self) -> str:
        when = f"{self.delay_s:.2f}s" if self.phase == "start" else str(self.step)
        return f"{self.word} {self.role} {self.phase}{'' if self.phase == 'again' else f':{when}'}"


@dataclass(frozen=True)
class Session:
    """One start of a run, and what strikes it."""

    num_ranks: int
    launcher: str
    overrides: tuple[str, ...]
    replace: int
    blows: tuple[Blow, ...]
    is_hasty: bool = False
    """Whether the next session starts while processes of this one may still end."""

    def __str__(self) -> str:
        keys = (
            key.removeprefix("mesh.") for key in self.overrides if not key.endswith(("=1", "=none"))
        )
        more = f" replace={self.replace}" if self.replace else ""
        return " ".join([f"{self.num_ranks} {self.launcher}", *keys]) + more


@dataclass(frozen=True)
class Plan:
    """A run: its task by name, and its sessions; the last one is not struck."""

    number: int
    task: str
    sessions: tuple[Session, ...]


def draw(seed: int, number: int) -> Plan:
    """A run of a campaign."""
    source = random.Random(f"kills/{seed}/{number}")
    name = source.choice(list(TASKS))
    count = source.randint(2, _MOST_SESSIONS)
    struck = [_session(source, TASKS[name], True) for _ in range(count)]
    return Plan(number, name, (*struck, _session(source, TASKS[name], False)))


def _session(source: random.Random, task: Task, is_struck: bool) -> Session:
    num_ranks = source.choice([1, 2, 2, 3, 4])
    launcher = (
        source.choice(["local", "mpi"]) if num_ranks > 1 else source.choice(["python", "local"])
    )
    tp, pp = source.choice([mesh for mesh in task.meshes if mesh[0] * mesh[1] <= num_ranks])
    sharding = source.choice(task.sharding) if num_ranks > 1 else "none"
    replace = source.choice([0, 0, 0, 1]) if num_ranks > 1 else 0
    return Session(
        num_ranks,
        launcher,
        (f"mesh.tp={tp}", f"mesh.pp={pp}", f"sharding={sharding}"),
        replace,
        tuple(_blows(source, launcher, num_ranks)) if is_struck else (),
        source.random() < 0.3,
    )


def _blows(source: random.Random, launcher: str, num_ranks: int) -> Iterator[Blow]:
    choices = _AT_ALL if launcher == "python" else _AT_RANKS | _AT_ALL
    step = 1
    for number in range(source.randint(2, _MOST_BLOWS)):
        phase = source.choices(list(_PHASES), list(_PHASES.values()))[0]
        if number == 0 and phase == "again":
            phase = "step"
        if number > 0 and phase == "start":
            phase = "again"
        what = source.choices(list(choices), list(choices.values()))[0]
        word, role = what.split()
        if word == "STOP" and (num_ranks == 1 or phase in ("start", "again")):
            word = "PAUSE"  # there is no watchdog that would end it, or not yet
        step = _step(source, phase, step)
        yield Blow(
            signal.SIGSTOP if word == "PAUSE" else signal.Signals[f"SIG{word}"],
            role,
            source.random(),
            phase,
            step,
            _DELAYS_S[phase] * source.random() ** (3 if phase == "again" else 1),
            source.uniform(0.1, HANG_S / 2) if word == "PAUSE" else 0.0,
        )


def _step(source: random.Random, phase: Phase, first: int) -> int:
    """A step from `first` on in which a phase comes."""
    every = {"checkpoint": CHECKPOINT_EVERY, "evaluation": EVAL_EVERY, "step": 1}.get(phase)
    if phase == "end":
        return STEPS
    if every is None:
        return first
    return source.choice([step for step in range(first, STEPS + 1) if step % every == 0] or [STEPS])
