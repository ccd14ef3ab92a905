"""Optimizers that evaluate again, have modes, or are scheduled: on any ranks, through losses."""

import functools
import sys
from pathlib import Path

import pytest
from tests.conftest import result, run
from tests.distributed.conftest import same

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

TASKS = Path(__file__).with_name("closure_tasks.py")
CONFIG = (
    "batch_size=16", "num_microbatches=8", "steps=8", "lr=0.01", "eval_every=3", "log_every=1",
    "checkpoint.every=4", "digest_every=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process that computes all of a task."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def call(task):
        argv = [sys.executable, "-m", "lockstep", "train", f"{TASKS}:{task}", *CONFIG]
        ended = run([*argv, "--run-dir", task], folder)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return result(folder / task)

    return call


@pytest.mark.parametrize(
    ("task", "launcher", "num_ranks", "keys", "faults"),
    [
        ("Searched", "local", 3, (), [PlannedFault(1, 2, "search"), PlannedFault(0, 5, "search")]),
        ("Sharp", "mpi", 3, (), [PlannedFault(2, 3, "search")]),
        ("Free", "local", 2, (), [PlannedFault(1, 4, "reduced")]),
        pytest.param(
            "Cycled",
            "local",
            3,
            ("sharding=optimizer",),
            [PlannedFault(2, 3, "committed"), PlannedFault(1, 5, "gather")],
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(task, launcher, 3, keys, faults, marks=pytest.mark.slow)
            for task, keys, moment in (
                ("Searched", (), "search"), ("Sharp", (), "search"), ("Free", (), "reduced"),
                ("Cycled", (), "reduced"), ("Cycled", ("sharding=gradients",), "reduced"),
            )
            for launcher in ("local", "mpi")
            for faults in (
                [],
                [PlannedFault(0, 3, "committed"), PlannedFault(1, 4, "reduce")],
                [PlannedFault(0, 3, "optimizer"), PlannedFault(2, 6, "compute")],
                [PlannedFault(1, 4, moment, delay_s=0.004), PlannedFault(2, 5, "evaluate")],
            )
        ),
    ],
)  # fmt: skip
def test_losses_change_nothing(train_on, alone, tmp_path, task, launcher, num_ranks, keys, faults):
    target = f"{TASKS}:{task}"
    ended = train_on(
        tmp_path / "run", num_ranks, *keys, launcher=launcher, faults=faults, target=target
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", alone(task))
    lost = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "RankLost"]
    assert len(lost) == len({fault.slot for fault in faults})


@pytest.mark.parametrize("task", ["Searched", "Free", "Sharp"])
def test_a_run_goes_on_from_a_checkpoint(here, alone, tmp_path, task):
    run_dir = tmp_path / "run"
    argv = ["--run-dir", str(run_dir), *CONFIG]
    assert here("train", f"{TASKS}:{task}", *argv, "stop_at_step=5").returncode == 0
    assert here("resume", str(run_dir), "stop_at_step=null").returncode == 0
    same(run_dir, alone(task))
    ended = here("eval", str(run_dir), "--split", "val", "--checkpoint", "latest")
    assert f"{alone(task)['metrics']['val/loss']:.6g}" in ended.stdout


@pytest.mark.parametrize(
    ("task", "keys", "said"),
    [
        ("Searched", ["sharding=optimizer"], "LBFGS is not known to be element-wise"),
        ("Searched", ["clip_norm=1.0"], "clip_norm=1.0: LBFGS evaluates the loss again"),
        ("Searched", ["precision.dtype=fp16"], "precision.dtype=fp16: LBFGS evaluates"),
        ("Searched", ["compression.name=topk"], "compression.name=topk: LBFGS evaluates"),
        ("Searched", ["local.steps=2"], "local.steps=2: LBFGS evaluates the loss again"),
        ("Gan", ["batch_size=8"], "LBFGS of 'one' evaluates the loss again when it steps"),
    ],
)
def test_what_does_not_go_together_is_refused(here, tmp_path, task, keys, said):
    ended = here("train", f"{TASKS}:{task}", "--run-dir", str(tmp_path / "run"), *CONFIG, *keys)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_loss_after_the_last_step_leaves_the_parameters_that_are_kept(lockstep, alone, tmp_path):
    ended = lockstep(
        "train", f"{TASKS}:FreeToTheEnd", "-n", 2, "--launcher", "local", "--run-dir",
        tmp_path / "run", *CONFIG, timeout=100, DIE_LAST="1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "run" / "died").exists()
    same(tmp_path / "run", alone("Free"))
    lost = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "RankLost"]
    assert len(lost) == 1
