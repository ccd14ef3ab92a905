"""A run directory that is deleted, moved or replaced while a run trains in it costs no step."""

from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.test_errors import refused

from lockstep.engine.faults import PlannedFault, to_env

TARGET = f"{Path(__file__).with_name('vanishing_tasks.py')}:Fit"
LAUNCHERS = {
    "python": (),
    "local": ("-n", "2", "--launcher", "local"),
    "mpi": ("-n", "2", "--launcher", "mpi"),
    "torchrun": ("-n", "2", "--launcher", "torchrun"),
}


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("local", "deleted"),
        pytest.param("mpi", "moved", marks=pytest.mark.slow),
        pytest.param("python", "replaced", marks=pytest.mark.slow),
        pytest.param("torchrun", "deleted", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_directory_is_gone_ends_and_saves_its_state_beside_it(
    lockstep, tmp_path, launcher, how
):
    ended = lockstep("train", TARGET, "--run-dir", "run", f"how={how}", *LAUNCHERS[launcher])
    refused(
        ended, "run: was deleted, moved or replaced", "go on with `lockstep resume run-rescued`"
    )
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left == ({"mine.txt"} if how == "replaced" else set())
    assert lockstep("resume", "run-rescued").returncode == 0
    assert lockstep("train", TARGET, "--run-dir", "straight").returncode == 0
    rescued, straight = (result(tmp_path / name) for name in ("run-rescued", "straight"))
    assert rescued["params_sha256"] == straight["params_sha256"]


def test_a_directory_that_is_gone_at_the_very_end_is_found_too(lockstep, tmp_path):
    ended = lockstep("train", TARGET, "--run-dir", "run", "how=deleted", "steps=20")
    refused(ended, "training has stopped after step 20", "run-rescued")
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "run-rescued" / "checkpoints" / "step_00000020").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["backward", "checkpoint"])  # before the rescue, and in it
def test_the_next_rank_0_saves_it_too(lockstep, tmp_path, moment):
    faults = [
        PlannedFault(1, 20, "compute", "move", sleep_s=0.0),
        PlannedFault(0, 21 if moment == "backward" else 20, moment),
    ]
    environ = to_env(faults, tmp_path / "faults", tmp_path / "run")
    ended = lockstep("train", TARGET, "--run-dir", "run", *LAUNCHERS["local"], **environ)
    refused(
        ended, "run: was deleted, moved or replaced", "go on with `lockstep resume run-rescued`"
    )
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"faults", "run-moved", "run-rescued"}
    assert lockstep("resume", "run-rescued").returncode == 0
    rescued = result(tmp_path / "run-rescued")
    assert lockstep("train", TARGET, "--run-dir", "straight").returncode == 0
    assert rescued["params_sha256"] == result(tmp_path / "straight")["params_sha256"]
