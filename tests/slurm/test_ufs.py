"""The sea-ice emulator's four modes on a real SLURM cluster (of nodes with two cores each)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import result, run

pytestmark = pytest.mark.slurm

EXAMPLES = Path(__file__).parents[2] / "examples" / "ufs"
KEYS = ("threads=2", "steps=20", "hidden=[8]", "eval_every=10", "log_every=10")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """The SHA-256 that one process with two threads ends with."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "lockstep", "train", "ufs", "--run-dir", "one", *KEYS]
    done = run(command, folder, **cache)
    assert done.returncode == 0, done.stderr
    return result(folder / "one")["params_sha256"]


def submit(cluster, folder, name, target, *keys, **env):
    """Submit a mode as its file has it, but for the CPUs that these nodes do not have."""
    folder.mkdir()
    options = ("--cpus-per-task", "2", "--time", "5", "--output", "job.sbatch", "--submit")
    job = ("--job", str(EXAMPLES / f"{name}.yaml"), "--run-dir", "run", *options)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "slurm", target, *keys, *job],
        cwd=folder, env={**cluster.env, **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.slow
def test_the_modes_train_to_the_same_bits(cluster, alone, cache, tmp_path):
    modes = {"one-node": 1, "two-nodes": 2, "four-nodes": 4}
    jobs = {n: submit(cluster, tmp_path / n, n, "ufs", *KEYS, **cache) for n in modes}
    for name, nodes in modes.items():
        ended = cluster.wait_for_end(jobs[name], 180)
        log = (tmp_path / name / f"job-{jobs[name]}.log").read_text()
        assert ended["JobState"] == "COMPLETED", log
        assert result(tmp_path / name / "run")["world_size"] == nodes
        assert result(tmp_path / name / "run")["params_sha256"] == alone
        assert f"on {nodes} node(s): n" in log
        assert f"{nodes} rank(s), 1 a node with 2 CPU(s) each, 2 thread(s) each;" in log
        assert "what: ufs threads=2 steps=20" in log
        rows = (tmp_path / name / "run" / "events.jsonl").read_text().splitlines()
        joined = [row for row in map(json.loads, rows) if row["event"] == "Joined"]
        assert [row["threads"] for row in joined] == [2] * nodes


def test_the_communication_test(cluster, tmp_path):
    # The nodes of this cluster have names that nobody resolves.
    job = submit(cluster, tmp_path / "job", "communication", "doctor", MASTER_ADDR="127.0.0.1")
    ended = cluster.wait_for_end(job, 240)
    log = (tmp_path / "job" / f"job-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    for launcher in ("mpi", "srun"):
        for collective in ("all-reduce", "broadcast", "barrier", "all-to-all"):
            assert f"{launcher} {collective}" in log
    assert "2 ranks: right on every rank" in log
    assert "fail" not in log
