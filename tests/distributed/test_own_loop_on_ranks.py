"""A loop of one's own on ranks that die in it, leave it and end the run: the bits of `ls.train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import result
from tests.distributed import own_loop
from tests.distributed.conftest import CONFIG, same
from tests.nn import models

import lockstep as ls
from lockstep.engine.faults import Moment, PlannedFault, to_env

SCRIPT = own_loop.__file__
DEEP = f"{models.__file__}:Deep"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ls.Result:
    """The run of one process by `ls.train`."""
    config = own_loop.Everything.Config(**own_loop.KEYS)
    path = tmp_path_factory.mktemp("plain") / "run"
    return ls.train(own_loop.Everything(config), config, run_dir=path, quiet=True)


@pytest.fixture
def looped(lockstep: Any, tmp_path: Path) -> Any:
    """Runs the script; what each process has had, by the name of its file."""

    def call(command: str, plans: list[Any], *arguments: Any, **env: str) -> tuple[Any, Any]:
        folder = tmp_path / f"seen{len(list(tmp_path.glob('seen*')))}"
        folder.mkdir()
        env |= {"OWN_LOOP": json.dumps(plans), "OWN_LOOP_FOLDER": str(folder), "PYTHONPATH": ROOT}
        where = (SCRIPT, "--run-dir", "run") if command == "train" else ("run",)
        done = lockstep(command, *where, *arguments, timeout=100, **env)
        seen = {f.name.partition("-")[0]: f.read_text() for f in sorted(folder.glob("*.txt"))}
        return done, {slot: text.splitlines() for slot, text in seen.items()}

    return call


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[0]) for line in lines if line != "end"]


def test_ranks_die_in_the_body_one_leaves_and_fewer_go_on(
    looped: Any, tmp_path: Path, plain: ls.Result
) -> None:
    plans = [[1, 2, "die"], [2, 5, "die"], [0, 7, "break"]]
    done, seen = looped("train", plans, "-n", 3, "--launcher", "local", "--replace", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = result(tmp_path / "run")
    assert (ended["status"], ended["step"]) == ("stopped", 7)
    assert ended["reason"].startswith("the loop was left")
    assert numbers(seen["0"]) == [1, 2, 3, 4, 5, 6, 7]  # each once, whoever is lost
    assert numbers(seen["2"]) == [1, 2, 3, 4, 5]
    done, after = looped("resume", [[-1, 12, "the last step says so"]])
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(after["0"]) == [8, 9, 10, 11, 12]
    ended = result(tmp_path / "run")
    assert ended["reason"] == "the last step says so"
    assert ended["params_sha256"] == plain.params_sha256
    assert ended["metrics"]["val/loss"] == plain.metrics["val/loss"]


FAULTS: list[tuple[Moment, int]] = [
    ("committed", 4), ("evaluate", 3), ("checkpoint", 5), ("summing", 4), ("regroup", 4),
    ("gathered", 5), ("optimizer", 5),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
@pytest.mark.parametrize("what", ["break", "enough"])
@pytest.mark.parametrize("slot", [0, 1])
def test_losses_around_the_end_of_a_loop(
    looped: Any, tmp_path: Path, plain: ls.Result, launcher: str, what: str, slot: int
) -> None:
    """Ranks die at many moments of steps, and in the body that ends the run."""
    faults = [PlannedFault(slot, step, moment) for moment, step in FAULTS]
    env = to_env(faults, tmp_path / "faults")
    plans = [[-1, 6, what], [2, 6, "die"]]
    done, seen = looped("train", plans, "-n", 3, "--launcher", launcher, "--replace", 8, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = result(tmp_path / "run")
    assert ended["step"] == 6
    assert (ended["status"], ended["reason"]) == (
        ("completed", "enough") if what == "enough" else ("stopped", ended["reason"])
    )
    for lines in seen.values():
        assert numbers(lines) == sorted({*numbers(lines)})
    done, after = looped("resume", [], "-n", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(after["0"]) == ([] if what == "enough" else [7, 8, 9, 10, 11, 12])
    if what == "break":
        assert result(tmp_path / "run")["params_sha256"] == plain.params_sha256


REFUSED = f"error: budget.txt: is missing (in {SCRIPT}:"
EXITED = "its script with exit code 1; their messages are in run/ranks.log\nnot good enough\n"


@pytest.mark.parametrize(
    ("launcher", "plans", "code", "message", "is_saved"),
    [
        ("local", [[1, 5, "refuse"]], 2, REFUSED, True),
        *(
            pytest.param(launcher, *rest, marks=pytest.mark.slow)
            for launcher, *rest in (
                ("local", [[1, 5, "exit"]], 1, EXITED, True),
                ("mpi", [[1, 5, "refuse"]], 2, REFUSED, True),
                ("torchrun", [[-1, 5, "refuse"]], 2, REFUSED, True),
                ("mpi", [[1, 5, "raise"]], 1, "KeyError: 'of the body'", True),
                ("torchrun", [[1, 5, "raise"]], 1, "KeyError: 'of the body'", True),
                ("mpi", [[1, 5, "enough"]], 2, "body ends the run on rank 1 for 'enough'", False),
                ("mpi", [[1, 4, "change"]], 2, "was changed; change it in Task", False),
            )
        ),
    ],
)
def test_bodies_that_differ(
    looped: Any,
    tmp_path: Path,
    launcher: str,
    plans: list[Any],
    code: int,
    message: str,
    is_saved: bool,
) -> None:
    done, _ = looped("train", plans, "-n", 2, "--launcher", launcher)
    assert (done.returncode, done.stderr.count(message)) == (code, 1), done.stdout + done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_00000005").is_dir() == is_saved


SPLIT = """
import os
import torch
import lockstep as ls
from tests.nn.models import Deep

if __name__ == "__main__":
    for step in ls.steps(Deep(), Deep.Config()):
        sum(p.sum().item() for p in step.model.parameters())  # to read is allowed
        if step.number == 2 and os.environ.get("CALLS"):
            step.model(torch.zeros(2, 4, dtype=torch.long))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [("mesh.tp=2",), ("mesh.pp=2",), ("sharding=parameters",)], ids=" ".join
)
def test_a_model_over_several_ranks_may_be_read_but_not_called(
    lockstep: Any, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    script = tmp_path / "split.py"
    script.write_text(SPLIT)
    options = ("--launcher", "local", *CONFIG, "steps=4", *keys)
    done = lockstep("train", script, "-n", 2, "--run-dir", "run", *options, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = lockstep("train", DEEP, "--run-dir", "alone", *CONFIG, "steps=4")
    assert alone.returncode == 0, alone.stderr
    same(tmp_path / "run", result(tmp_path / "alone"))
    env = {"PYTHONPATH": ROOT, "CALLS": "1"}
    done = lockstep("train", script, "-n", 2, "--run-dir", "calls", *options, **env)
    assert done.returncode == 2
    refusal = "whose shards are on several" if keys == ("mesh.tp=2",) else "the model is in stages"
    assert refusal in done.stderr, done.stderr
    assert result(tmp_path / "calls")["status"] == "stopped"
