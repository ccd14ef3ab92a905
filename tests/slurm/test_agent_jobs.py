"""Agents on the nodes of a real SLURM cluster: a lost node ends neither the run nor the job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import result
from tests.launching.host.test_agents import free_port
from tests.slurm.cluster import wait_for
from tests.slurm.conftest import OVERRIDES
from tests.slurm.test_jobs import SLOW, events, wait_for_training

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


# The nodes have one address, and it is the first one's by right.
LATE = """
import os, sys, time
if "agent" in sys.orig_argv and os.environ.get("SLURM_PROCID", "0") != "0":
    time.sleep(2)
"""


@pytest.fixture
def place(tmp_path):
    """Where agents meet: the nodes of this cluster have names that nobody resolves."""
    folder = tmp_path / "late"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LATE)
    port = str(free_port())
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(folder)}
    return there | {"LOCKSTEP_RENDEZVOUS": f"127.0.0.1:{port}"}


def nodes_of(cluster, job):
    return cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()


def lose(cluster, job, folder):
    """Lose the second node of a job in the middle of training, and wait for the job's end."""
    wait_for_training(folder)
    _, second = nodes_of(cluster, job)
    try:
        cluster.kill_node(second)
        wait_for(lambda: events(folder, "Recovered"), 30, "the others to go on")
        return cluster.wait_for_end(job, 120)
    finally:
        cluster.start_node(second)
        cluster.wait_until_idle()


def test_a_script_of_the_user_survives_a_node(cluster, expected, tmp_path, place):
    cluster.wait_until_idle()
    (tmp_path / "job").write_text(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --no-kill --time=10\n"
        "#SBATCH --output=job-%j.log\n"
        "srun --no-kill --kill-on-bad-exit=0 lockstep agent --rendezvous $MASTER_ADDR:$MASTER_PORT "
        f"--hosts 2 -- train {SLOW} {' '.join(OVERRIDES)} --run-dir run\n"
        "grep -q completed run/result.json\n"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sbatch", "--parsable", "job"], cwd=tmp_path, capture_output=True, text=True,
        env={**cluster.env, **place, "PATH": path, "SLOW_S": "0.2"}, check=True,
    )  # fmt: skip
    job = done.stdout.strip()
    ended = lose(cluster, job, tmp_path)
    log = (tmp_path / f"job-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert [row["world_size"] for row in events(tmp_path, "Recovered")] == [1], log
    assert result(tmp_path / "run")["params_sha256"] == expected


def test_a_job_of_agents_survives_a_node(submit, cluster, expected, tmp_path, place):
    cluster.wait_until_idle()
    options = ("--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "2", "threads=1")
    job = submit(tmp_path, SLOW, *options, "--time", "10", "--agents", SLOW_S="0.2", **place)
    ended = lose(cluster, job, tmp_path)
    log = (tmp_path / f"job-{job}.log").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), log
    assert "ended: completed, exit code 0" in log
    assert [row["world_size"] for row in events(tmp_path, "Recovered")] == [1], log
    assert result(tmp_path / "run")["params_sha256"] == expected


def test_the_notice_reaches_the_ranks_of_agents(submit, cluster, expected, tmp_path, place):
    options = ("--nodes", "2", "--ntasks-per-node", "1", "--time", "10", "--agents")
    job = submit(tmp_path, SLOW, *options, SLOW_S="0.1", **place)
    wait_for_training(tmp_path)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    ended = cluster.wait_for_end(job, 120)
    log = (tmp_path / f"job-{job}.log").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert events(tmp_path, "Finished")[0]["reason"] == "preempted"
    assert result(tmp_path / "run")["params_sha256"] == expected
