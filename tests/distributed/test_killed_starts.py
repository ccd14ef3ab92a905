"""A rank that is killed while ranks start costs a start, where a replica needs all of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.conftest import result

from lockstep.config import TrainConfig
from lockstep.errors import RankFailure
from lockstep.launching.api.rank import _assembled

TASK = f"{Path(__file__).with_name('state_tasks.py')}:DiesAtStart"


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        ("local", 0),
        pytest.param("mpi", 1, marks=pytest.mark.slow),
        pytest.param("local", 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_are_started_again_where_too_few_are_left_to_fill_a_replica(
    lockstep, tmp_path, launcher, rank
):
    ended = lockstep(
        "train", TASK, "-n", "2", "--launcher", launcher, "--run-dir", "run", "mesh.pp=2",
        "steps=3", DIE_FLAG=str(tmp_path / "flag"), DIE_RANK=str(rank),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "of 2 that are needed 1 are left; starting again" in ended.stderr
    alone = lockstep(
        "train", TASK, "--run-dir", "alone", "steps=3", DIE_FLAG=str(tmp_path / "flag")
    )
    assert alone.returncode == 0, alone.stderr
    both = [result(tmp_path / name)["params_sha256"] for name in ("run", "alone")]
    assert both[0] == both[1]


def test_a_rank_that_is_killed_while_ranks_meet_is_no_error_of_the_config():
    runtime = SimpleNamespace(transport=SimpleNamespace(size=1))
    config = TrainConfig(mesh={"pp": 2})
    with pytest.raises(RankFailure, match="of 2 that are needed 1 are left"):
        _assembled(None, config, print, list, runtime, None, world_size=2, is_driven=False)
