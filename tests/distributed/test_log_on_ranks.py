"""What is logged is the same on any number of ranks, also where rank 0 dies."""

from pathlib import Path

import pytest
from tests.conftest import result, target

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TASK = f"{Path(__file__).parent / 'log_tasks.py'}:Logging"
KEYS = ("eval_every=3", "steps=9")


def logged(run_dir):
    rows = read_events(run_dir / "events.jsonl")
    kept = ("step", "name", "kind", "value", "text")
    return [[row.get(key) for key in kept] for row in rows if row["event"] == "Logged"]


def pictures(run_dir):
    root = run_dir / "logged"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.png")}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_ranks_log_what_one_process_logs_though_rank_0_dies(lockstep, tmp_path, launcher):
    def train(name, task, num_ranks, *options, **env):
        done = lockstep("train", task, "--run-dir", name, "-n", num_ranks, *options, *KEYS, **env)
        assert done.returncode == 0, done.stderr
        return tmp_path / name

    silent = train("silent", target(), "1")
    alone = train("alone", TASK, "1")
    faults = [PlannedFault(0, 5, "committed")]
    env = to_env(faults, tmp_path / "faults")
    others = train("others", TASK, "3", "--launcher", launcher, **env)
    assert len((tmp_path / "faults").read_text().splitlines()) == 1
    shas = [result(run)["params_sha256"] for run in (silent, alone, others)]
    assert shas == shas[:1] * 3
    assert logged(others) == logged(alone)
    assert len(pictures(alone)) == 9
    assert pictures(others) == pictures(alone)
