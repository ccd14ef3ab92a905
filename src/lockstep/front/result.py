"""What a training gives back to the program that has asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config import TrainConfig
from lockstep.engine.task import Task
from lockstep.errors import LockstepError


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it has made; the same on every rank.

    Attributes:
        status: `completed`, or `stopped` where it ended before its last step on request.
        reason: why it ended, in words.
        step: number of optimizer steps that the run has done.
        model: the trained model, in evaluation mode, with the parameters of the last step.
        task: the task, with its own state after the last step.
        config: the config that the run had.
        metrics: the newest training and evaluation metrics by "split/name".
        arrays: the newest metrics of more than one number, as nested lists by "split/name".
        params_sha256: SHA-256 of the parameters and buffers, 64 hex digits.
        run_dir: the run directory.
        best_checkpoint: folder of the checkpoint with the best `config.watch`; None where there
            was no evaluation.
        checkpoint: folder of the newest checkpoint.
        world_size: number of ranks at the end.
        wall_s: seconds that this sitting took.
    """

    status: str
    reason: str
    step: int
    model: nn.Module = field(repr=False)
    task: Task = field(repr=False)
    config: TrainConfig = field(repr=False)
    metrics: dict[str, float]
    arrays: dict[str, Any]
    params_sha256: str
    run_dir: Path
    best_checkpoint: Path | None
    checkpoint: Path | None
    world_size: int
    wall_s: float


class Stopped(LockstepError):
    """A run was asked to stop before its end, or too few ranks were left; it can be resumed.

    Attributes:
        exit_code: exit code of a program that ends for this: 130 after Ctrl-C, 143 after SIGTERM
            or a preemption, 75 where too few ranks are left.
        result: how far the run has come.
    """

    is_shared = True
    is_told = True

    def __init__(self, result: Result, exit_code: int) -> None:
        super().__init__(
            f"stopped after step {result.step}: {result.reason}; go on with "
            f"`lockstep resume {result.run_dir}`, or resume=True"
        )
        self.result = result
        self.exit_code = exit_code
