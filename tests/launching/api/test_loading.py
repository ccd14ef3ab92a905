"""A trained model comes back in Python as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import result

import lockstep as ls
from lockstep.engine.digests import model_digest

Here = Callable[..., Any]
CONFIG = ("model=mlp", "steps=12", "eval_every=4", "checkpoint.every=4", "checkpoint.keep=9")


@pytest.fixture
def run_dir(here: Here, tmp_path: Path) -> Path:
    assert here("train", "digits", "--run-dir", "мой run", *CONFIG).returncode == 0
    return tmp_path / "мой run"


def test_the_latest_model_has_the_digest_of_the_run(run_dir: Path) -> None:
    loaded = ls.load(run_dir, "latest")
    assert model_digest(loaded.model) == result(run_dir)["params_sha256"]
    assert (loaded.step, loaded.run_dir, loaded.config.steps) == (12, run_dir, 12)
    assert not loaded.model.training
    images = torch.zeros(2, 1, 8, 8)
    assert torch.equal(loaded.model(images)[0], loaded.model(images)[1])


def test_which_checkpoint(run_dir: Path) -> None:
    assert ls.load(str(run_dir), 8).step == 8
    assert ls.load(run_dir).step in (4, 8, 12)
    with pytest.raises(ls.LockstepError, match="must be best, latest, or a step's number"):
        ls.load(run_dir, "newest")
    with pytest.raises(ls.LockstepError):
        ls.load(run_dir, 7)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ls.LockstepError, match="nowhere"):
        ls.load(tmp_path / "nowhere")


def test_generators_of_the_caller_are_left_alone(run_dir: Path) -> None:
    drawn = []
    for is_loaded in (False, True):
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(5)
        if is_loaded:
            ls.load(run_dir)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_a_script_may_import_its_task(here: Here, lockstep: Here, tmp_path: Path) -> None:
    assert here("init", "spirals.py").returncode == 0
    lines = ("import lockstep as ls", "from spirals import Spirals", "if __name__ == '__main__':")
    call = "    ls.train(Spirals(), Spirals.Config(epochs=1))"
    (tmp_path / "caller.py").write_text("\n".join((*lines, call)), encoding="utf-8")
    trained = lockstep("train", "caller.py", "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    assert (
        model_digest(ls.load(tmp_path / "run").model) == result(tmp_path / "run")["params_sha256"]
    )
