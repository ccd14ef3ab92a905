"""`ls.train` as a program calls it, and `ls.main` as a script does."""

from __future__ import annotations

import os
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import run
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.errors import ConfigError

SCRIPT = """
import lockstep as ls
from tests.launching.api.test_train import Line
CONFIG = ls.TrainConfig(steps=6)
{call}
print("went on", flush=True)
"""


class Line(ls.Task):
    """A line through a few points."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Dataset[Any] | None:
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, 2 * x + 1) if split != "test" else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss((model(x) - y).square().sum(), len(x))


class StopsItself(Line):
    """Presses Ctrl-C after its third step."""

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def config(**keys: Any) -> ls.TrainConfig:
    return ls.TrainConfig(batch_size=16, num_microbatches=4, lr=0.1, **keys)


def test_gives_back_what_it_has_made(tmp_path: Path) -> None:
    task = Line(config(epochs=3))
    result = ls.train(task, run_dir=tmp_path / "run", quiet=True)
    assert (result.status, result.step, result.run_dir) == ("completed", 12, tmp_path / "run")
    assert result.task is task
    assert result.config.epochs == 3
    assert not result.model.training
    best = ls.load(result.run_dir, "latest", task=Line).model.state_dict()
    for name, value in result.model.state_dict().items():
        assert torch.equal(value, best[name])
    assert result.metrics["val/loss"] < 1
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.is_dir()
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step_00000012"


def test_leaves_the_caller_as_it_was(tmp_path: Path) -> None:
    threads, variables = torch.get_num_threads(), dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    ls.train(Line(), config(threads=threads + 1), run_dir=tmp_path / "run", quiet=True)
    assert torch.get_num_threads() == threads
    assert dict(os.environ) == variables
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_keys_of_the_config_as_arguments(tmp_path: Path) -> None:
    given = ls.train(Line(), config(steps=2), run_dir=tmp_path / "given", quiet=True)
    keys = {"batch_size": 16, "num_microbatches": 4, "lr": 0.1}
    named = ls.train(Line(), ls.TrainConfig(steps=2), run_dir=tmp_path / "n", quiet=True, **keys)
    assert named.config == given.config == named.task.config
    assert named.params_sha256 == given.params_sha256


@pytest.mark.parametrize(
    ("task", "keys", "message"),
    [
        (Line(), {"batchsize": 16}, "unknown key 'batchsize'; did you mean batch_size?"),
        (Line(), {"batch_size": "x"}, "batch_size='x': "),
        (Line, {}, r"needs a Task, got .*; call Line\(\)"),
    ],
)
def test_arguments_that_do_not_work(
    task: Any, keys: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for call in (ls.train, ls.steps):
        with pytest.raises(ls.LockstepError, match=f"^{call.__name__}: {message}"):
            call(task, **keys)
    with pytest.raises(SystemExit, match="2"):
        ls.main(task, **keys)
    assert "error: main: " in capfd.readouterr().err


def test_raises_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Bad(Line):
        def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
            raise KeyError("lost")

    with pytest.raises(ls.LockstepError, match="'lost'"):
        ls.train(Bad(), config(), run_dir=tmp_path / "run", quiet=True)
    assert "KeyError" not in capfd.readouterr().err


def test_ctrl_c_raises_and_the_run_goes_on_later(tmp_path: Path) -> None:
    plain = ls.train(Line(), config(steps=6), run_dir=tmp_path / "plain", quiet=True)
    with pytest.raises(ls.Stopped, match="stopped after step 4: interrupted") as caught:
        ls.train(StopsItself(), config(steps=6), run_dir=tmp_path / "run", quiet=True)
    assert caught.value.exit_code == 130
    assert caught.value.result.step == 4
    result = ls.train(
        StopsItself(), config(steps=6), run_dir=tmp_path / "run", resume=True, quiet=True
    )
    assert result.params_sha256 == plain.params_sha256


@pytest.mark.parametrize("name", ["main", "train"])
def test_a_script_that_ends_in_an_error(tmp_path: Path, ranks: Any, name: str) -> None:
    script = tmp_path / "script.py"
    call = f"ls.{name}(Line(ls.TrainConfig(watch='nonsense')))"
    script.write_text(SCRIPT.format(call=call))
    done = ranks("local", 2, script, PYTHONPATH=str(Path(__file__).parents[3]))
    assert done.returncode == 2
    assert "error: watch='nonsense'" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "went on" not in done.stdout


@pytest.mark.parametrize(
    ("call", "code"),
    [
        pytest.param("ls.main(StopsItself(CONFIG), run_dir='run')", 130, marks=pytest.mark.slow),
        ("ls.train(StopsItself(CONFIG), run_dir='run')", 130),
        pytest.param(
            "try:\n    ls.train(StopsItself(CONFIG), run_dir='run')\nexcept ls.Stopped: pass",
            0,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_ctrl_c_stops(tmp_path: Path, call: str, code: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(call=call).replace("Line", "StopsItself"))
    root = str(Path(__file__).parents[3])
    done = run([sys.executable, "script.py"], tmp_path, PYTHONPATH=root)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr
    assert ("went on" in done.stdout) == (code == 0)


def test_two_threads_do_not_train_at_once(tmp_path: Path) -> None:
    class TrainsBeside(Line):
        def after_step(self, model: nn.Module, step: int) -> None:
            if step == 1:
                with ThreadPoolExecutor(1) as pool:
                    beside = pool.submit(ls.train, Line(config()), run_dir=tmp_path / "b")
                    errors.append(beside.exception())

    errors: list[BaseException | None] = []
    ls.train(TrainsBeside(), config(steps=2), run_dir=tmp_path / "a", quiet=True)
    assert isinstance(errors[0], ConfigError)
    assert "another thread of this process trains already" in str(errors[0])
    ls.train(Line(), config(steps=2), run_dir=tmp_path / "c", quiet=True)
