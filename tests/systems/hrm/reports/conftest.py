"""Runs of a few steps: Sudokus of 4x4, and mazes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.launching.api import Session, run
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.reports.trained_model import TrainedModel, load_trained
from lockstep.systems.hrm.task import Hrm

TINY: dict[str, Any] = {
    "dim": 16, "num_heads": 2, "num_blocks": 1, "mixing": "mlp", "high_cycles": 1,
    "low_cycles": 1, "batch_size": 8, "num_microbatches": 2, "steps": 3, "eval_every": 3,
    "num_train": 24, "num_val": 12, "augment": 0, "eval_batch_size": 5, "eval_segments": 4,
    "ema": 0.5, "lr": 0.02, "schedule": {"warmup_steps": 0}, "device": "cpu", "threads": 1,
}  # fmt: skip


def new_run(folder: Path, **keys: Any) -> Path:
    """The directory of a run with other keys than `TINY`."""
    config = HrmConfig.model_validate({**TINY, **keys})
    run(Hrm(config), config, Session(str(folder), target="hrm", quiet=True))
    return folder


@pytest.fixture(scope="session")
def sudokus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; not to be changed."""
    return new_run(tmp_path_factory.mktemp("reports") / "su <b>&amp; run")


@pytest.fixture(scope="session")
def mazes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; not to be changed."""
    return new_run(
        tmp_path_factory.mktemp("reports") / "mazes", puzzle="maze", size=30, mixing="attention",
        num_train=2, num_val=2, batch_size=2, num_microbatches=1, steps=1, eval_segments=2,
        eval_every=1,
    )  # fmt: skip


@pytest.fixture
def model(sudokus: Path) -> TrainedModel:
    """The model of the Sudokus, whose puzzles halt by themselves after different segments."""
    found = load_trained(sudokus, "latest")
    assert found.task.average is not None
    average = found.task.average.average
    average["halting.weight"].normal_(generator=torch.Generator().manual_seed(0))
    average["halting.bias"].zero_()
    q_halt = found.answers(found.puzzles("val")[0], 9).q_halt
    average["halting.bias"].fill_(-float(np.median(q_halt.max(axis=0))))
    return found


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Makes a run directory, of other keys than those of all these runs."""
    return new_run
