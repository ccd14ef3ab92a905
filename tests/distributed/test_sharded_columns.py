"""Optimizer state shared out over the ranks of each column of a mesh: the bits of one process."""

from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import CONFIG, check_joiners, same

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

MODELS = Path(__file__).parents[1] / "nn" / "models.py"
TASK = f"{MODELS}:Deep"
SHARDED = "optimizer.sharded=true"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "pp", "tp"),
    [
        ("mpi", 6, 2, 1),
        ("local", 5, 1, 2),  # and a spare, which owns a slice
        ("torchrun", 4, 2, 1),
        ("mpi", 8, 2, 2),
        ("local", 7, 7, 1),  # the last trains no parameter
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, reference, tmp_path, launcher, num_ranks, pp, tp
):
    keys = (f"mesh.pp={pp}", f"mesh.tp={tp}", SHARDED)
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "axis", "faults"),
    [
        pytest.param("local", 4, "pp", [(1, 2, "gather")], marks=pytest.mark.slow),
        # In one column all have committed the step; in the other it is put together from slices.
        pytest.param(
            "local", 6, "pp", [(1, 2, "gather"), (3, 4, "committed")], marks=pytest.mark.slow
        ),
        pytest.param(
            "local", 5, "tp", [(0, 3, "optimizer"), (3, 5, "gather")], marks=pytest.mark.slow
        ),
        pytest.param(
            "local", 6, "tp", [(1, 3, "gathered"), (4, 3, "catch_up")], marks=pytest.mark.slow
        ),
        pytest.param("mpi", 4, "pp", [(2, 2, "gathered")], marks=pytest.mark.slow),
        pytest.param("mpi", 6, "tp", [(3, 4, "reduced")], marks=pytest.mark.slow),
    ],
)
def test_a_slice_survives_on_the_next_rank_of_its_column(
    train_on, reference, tmp_path, launcher, num_ranks, axis, faults
):
    planned = [PlannedFault(*fault) for fault in faults]
    run_dir = tmp_path / "run"
    ended = train_on(
        run_dir, num_ranks, f"mesh.{axis}=2", SHARDED, launcher=launcher, faults=planned
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)
    rows = read_events(run_dir / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == len(faults)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_joiners_get_slices_of_their_column(train_on, lockstep, tmp_path, launcher):
    check_joiners(train_on, lockstep, TASK, tmp_path, launcher, "mesh.pp=2", SHARDED)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_groups_of_other_stages_are_saved_and_restored(train_on, lockstep, tmp_path, sharded):
    task, key = f"{MODELS}:Groups", f"optimizer.sharded={sharded}"
    alone = tmp_path / "alone"
    assert lockstep("train", task, *CONFIG, "--run-dir", alone).returncode == 0
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, 4, "mesh.pp=2", "stop_at_step=3", key, target=task)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    one = ("resume", run_dir, "-n", 1, "mesh.pp=1")
    assert lockstep(*one, "stop_at_step=5").returncode == 0
    more = ("resume", run_dir, "-n", 3, "--launcher", "local", "mesh.pp=3", "stop_at_step=null")
    ended = lockstep(*more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, result(alone))
