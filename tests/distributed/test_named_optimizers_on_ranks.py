"""Several optimizers, in every step and in phases: the bits of one process on any mesh."""

import functools
import sys
from pathlib import Path

import pytest
from tests.conftest import result, run
from tests.distributed.conftest import CONFIG, same

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

MODELS = Path(__file__).parents[1] / "nn" / "models.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process that computes all of a task."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def call(task):
        argv = [sys.executable, "-m", "lockstep", "train", f"{MODELS}:{task}", *CONFIG]
        ended = run([*argv, "--run-dir", task], folder)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return result(folder / task)

    return call


@pytest.mark.parametrize(
    ("task", "launcher", "num_ranks", "keys"),
    [
        pytest.param(  # and a spare
            "InTurn", "local", 3, ("mesh.pp=2", "sharding=optimizer"), marks=pytest.mark.slow
        ),
        *(
            pytest.param(task, launcher, num_ranks, keys, marks=pytest.mark.slow)
            for task in ("Several", "InTurn")
            for launcher, num_ranks, keys in (
                ("local", 3, ()),
                ("local", 3, ("sharding=parameters",)),
                ("local", 2, ("sharding=gradients",)),
                ("mpi", 3, ("sharding=optimizer",)),
                ("mpi", 2, ("mesh.tp=2",)),
                ("mpi", 2, ("mesh.pp=2", "mesh.interleave=2")),
                ("local", 4, ("mesh.pp=4",)),
                ("local", 4, ("mesh.tp=2", "mesh.pp=2", "sharding=gradients")),
                ("torchrun", 2, ("sharding=optimizer",)),
            )
        ),
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, alone, tmp_path, task, launcher, num_ranks, keys
):
    target = f"{MODELS}:{task}"
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher, target=target)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", alone(task))


@pytest.mark.parametrize(
    ("task", "meshes"),
    [
        pytest.param(
            "Several", [(2, "mesh.pp=2"), (3, "sharding=optimizer")], marks=pytest.mark.slow
        ),
        pytest.param(
            "Several",
            [(2, "mesh.pp=2"), (3, "mesh.pp=3"), (1, "mesh.pp=1"), (2, "mesh.tp=2")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "InTurn",
            [(1, "sharding=none"), (4, "mesh.pp=4"), (3, "sharding=gradients"), (2, "mesh.pp=2")],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_on_another_mesh(train_on, lockstep, alone, tmp_path, task, meshes):
    run_dir, (first, *others) = tmp_path / "run", meshes
    ended = train_on(run_dir, first[0], first[1], "stop_at_step=2", target=f"{MODELS}:{task}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for number, (num_ranks, key) in enumerate(others, start=2):
        mesh = {"mesh.pp": "1", "mesh.tp": "1", "sharding": "none"} | dict([key.split("=")])
        stop = "null" if (num_ranks, key) == others[-1] else 2 * number
        keys = [*(f"{k}={v}" for k, v in mesh.items()), f"stop_at_step={stop}"]
        ended = lockstep("resume", run_dir, "-n", num_ranks, "--launcher", "local", *keys)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, alone(task))


@pytest.mark.parametrize(
    ("task", "launcher", "num_ranks", "keys", "faults"),
    [
        pytest.param(
            "Several", "local", 3, ("sharding=optimizer",), [(1, 2, "gather")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "InTurn", "local", 3, ("sharding=parameters",), [(2, 3, "leave"), (0, 5, "optimizer")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "InTurn", "mpi", 4, ("mesh.pp=2",), [(1, 3, "send"), (2, 5, "committed")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Several", "local", 6, ("mesh.pp=2", "sharding=gradients"),
            [(3, 2, "backward"), (1, 4, "committed")], marks=pytest.mark.slow,
        ),
        pytest.param(
            "Several", "mpi", 5, ("mesh.tp=2", "sharding=optimizer"), [(0, 3, "gathered")],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_survivors_have_the_state_of_all_optimizers(
    train_on, alone, tmp_path, task, launcher, num_ranks, keys, faults
):
    planned, run_dir = [PlannedFault(*fault) for fault in faults], tmp_path / "run"
    target = f"{MODELS}:{task}"
    ended = train_on(run_dir, num_ranks, *keys, launcher=launcher, faults=planned, target=target)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, alone(task))
    rows = read_events(run_dir / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == len(faults)


def test_one_that_is_not_element_wise_is_named(train_on, tmp_path):
    ended = train_on(tmp_path / "run", 2, "mesh.pp=2", target=f"{MODELS}:Whole")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "mesh.pp=2: Tuned of 'ends' is not known to be element-wise" in ended.stderr
    assert "Traceback" not in ended.stderr
