"""Plausible events, each field to be overridden by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Event,
    Finished,
    Joined,
    RankTimes,
    RunStarted,
    StepDone,
    Warned,
)
from lockstep.observe.sink import Sink


def run_started(**fields: Any) -> RunStarted:
    defaults: dict[str, Any] = {
        "step": 0,
        "task": "digits",
        "run_dir": "/runs/grün",
        "config_hash": "0123456789abcdef",
        "total_steps": 500,
        "steps_per_epoch": 25,
        "num_samples": 1437,
        "num_parameters": 9345,
        "world_size": 4,
        "transport": "mpi4py",
        "launcher": "mpirun",
        "device": "cpu",
        "threads": 1,
        "num_microbatches": 8,
        "batch_size": 64,
    }
    return RunStarted(**defaults | fields)


def joined(rank: int, host: str = "node1", **fields: Any) -> Joined:
    defaults: dict[str, Any] = {
        "step": 0,
        "slot": rank,
        "pid": 1000 + rank,
        "local_rank": rank,
        "device": "cpu",
        "threads": 1,
        "microbatches": (2 * rank, 2 * rank + 2),
    }
    return Joined(rank=rank, host=host, **defaults | fields)


def rank_times(rank: int) -> RankTimes:
    return RankTimes(
        rank=rank, compute_s=0.6 + rank, communication_s=0.25, data_s=0.125, checkpoint_s=0.0
    )


def step_done(step: int, **fields: Any) -> StepDone:
    defaults: dict[str, Any] = {
        "num_steps": 1,
        "epoch": 1,
        "loss": 1 / 3,
        "metrics": {"accuracy": 0.1 + 0.2},
        "lr": 1e-3,
        "grad_norm": 2.5,
        "loss_scale": 1.0,
        "samples": 64,
        "seconds": 0.5,
        "ranks": (rank_times(0), rank_times(1)),
    }
    return StepDone(step=step, **defaults | fields)


def evaluated(step: int, split: str = "val", /, **metrics: float) -> Evaluated:
    return Evaluated(
        step=step, split=split, metrics=metrics or {"loss": 0.25, "accuracy": 0.9}, seconds=0.5
    )


def checkpointed(step: int) -> Checkpointed:
    path = f"checkpoints/step_{step:08}"
    return Checkpointed(step=step, path=path, num_bytes=3 << 20, stall_s=0.01, write_s=0.5)


def finished(step: int = 500, **fields: Any) -> Finished:
    defaults: dict[str, Any] = {
        "status": "completed",
        "reason": "",
        "params_sha256": "ab" * 32,
        "metrics": {"accuracy": 0.97},
        "world_size": 4,
        "wall_s": 65.0,
    }
    return Finished(step=step, **defaults | fields)


class Recorder(Sink):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def warned(self, word: str) -> list[str]:
        """The warnings with a word."""
        return [e.message for e in self.events if isinstance(e, Warned) and word in e.message]

    def close(self) -> None:
        self.closed = True


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `file_bytes`: writes stop short, then fail."""
    soft, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
