"""Hooks on real ranks that die and are replaced are called as in one process, with their state."""

import pytest
from tests.conftest import result, target

from lockstep.engine.faults import PlannedFault, to_env

KEYS = ("hooked=5", "eval_every=2", "steps=40", "checkpoint.every=3")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_hooks_go_on_where_ranks_die(lockstep, tmp_path, launcher):
    def train(name, num_ranks, *options, **env):
        done = lockstep(
            "train", target(), "--run-dir", name, "-n", num_ranks, *options, *KEYS, **env
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "diary.txt").read_text().splitlines()
        kept = [line for line in lines if not line.startswith("checkpoint")]
        return result(tmp_path / name), kept

    alone, diary = train("alone", 1)
    assert alone["reason"] == "5 evaluations"
    assert alone["step"] == 10
    faults = [PlannedFault(1, 2, "evaluate"), PlannedFault(0, 7, "committed")]
    env = to_env(faults, tmp_path / "faults")
    others, theirs = train("run", 3, "--launcher", launcher, "--replace", 2, **env)
    assert len((tmp_path / "faults").read_text().splitlines()) == 2
    for key in ("params_sha256", "reason", "step", "metrics"):
        assert others[key] == alone[key]
    # Rank 0 died when its hooks had seen step 7; those of its successor may see it again.
    assert list(dict.fromkeys(theirs)) == diary
    assert {line for line in theirs if theirs.count(line) > 1} <= {diary[9]}
