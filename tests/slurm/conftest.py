"""A cluster for all tests of this folder, and what they expect."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import result, run
from tests.slurm.cluster import install, running

TASKS = Path(__file__).with_name("tasks.py")
OVERRIDES = ("steps=60", "model=mlp", "hidden=32", "checkpoint.every=5", "log_every=5")


@pytest.fixture(scope="session")
def cluster():
    reason = install()
    if reason:
        pytest.skip(f"no SLURM: {reason}")
    with running() as found:
        yield found


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The SHA-256 that one process ends with."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-m", "lockstep", "train", "digits", "--run-dir", "one", *OVERRIDES]
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return result(folder / "one")["params_sha256"]


@pytest.fixture(scope="session")
def submit(cluster):
    """Writes a job script with `lockstep slurm` and submits it: the job's number."""

    def call(folder, target, *options, **env):
        command = [sys.executable, "-m", "lockstep", "slurm", str(target), *OVERRIDES, *options]
        done = subprocess.run(
            [*command, "--run-dir", "run", "--output", "job.sbatch", "--submit"],
            cwd=folder, env={**cluster.env, **env}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    return call


@pytest.fixture(scope="session")
def limited(cluster, submit, tmp_path_factory):
    """Folder and number of a job that runs into its time limit while other tests go on."""
    folder = tmp_path_factory.mktemp("limited")
    options = ("--nodes", "2", "--time", "1", "--signal-before", "20")
    return folder, submit(folder, f"{TASKS}:SlowDigits", *options, SLOW_S="0.3")
