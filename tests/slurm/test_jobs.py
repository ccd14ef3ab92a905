"""Training on a real SLURM cluster: whatever happens to the job, one process's SHA-256."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.conftest import result
from tests.slurm.cluster import wait_for
from tests.slurm.conftest import OVERRIDES, TASKS

pytestmark = pytest.mark.slurm

SLOW = f"{TASKS}:SlowDigits"
TWO_NODES = ("--nodes", "2", "--ntasks-per-node", "1", "--time", "10")


def events(folder, kind):
    """The rows of one kind that the run has written so far."""
    try:
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["event"] == kind]


def wait_for_training(folder):
    """Wait until a checkpoint of the job's first start is on disk, with more steps to come."""
    wait_for(lambda: list(folder.glob("run/checkpoints/step_*")), 90, "a checkpoint")


def check(cluster, job, folder, expected, restarts, timeout=120):
    """The job ends well with the expected bits, started again as often as it ought to be."""
    ended = cluster.wait_for_end(job, timeout)
    log = "".join(path.read_text() for path in folder.glob("job-*.log"))
    assert ended["JobState"] == "COMPLETED", log
    # Where a start takes longer than SLURM waits with its notice, there is nothing to resume yet.
    early = log.count("told to stop before it had written a checkpoint; tried once more")
    assert ended["Restarts"] == str(restarts + early), log
    assert result(folder / "run")["status"] == "completed"
    assert result(folder / "run")["params_sha256"] == expected
    assert len(events(folder, "Resumed")) == restarts
    return log


def test_srun_starts_ranks_over_gloo(cluster, expected, limited, tmp_path):
    session = {"run_dir": str(tmp_path / "run"), "resume": False, "overrides": OVERRIDES}
    # The nodes of this cluster have names that nobody resolves.
    env = cluster.env | {"LOCKSTEP_SESSION": json.dumps(session), "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        ["srun", "-N", "4", "-n", "4", sys.executable, str(TASKS)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["world_size"] == 4
    assert result(tmp_path / "run")["params_sha256"] == expected


def test_a_recipe_and_a_script_complete(submit, cluster, expected, tmp_path):
    jobs = {}
    for name, target in {"recipe": "digits", "script": TASKS}.items():
        (tmp_path / name).mkdir()
        options = ("--nodes", "2", "--ntasks-per-node", "1", "--time", "10")
        jobs[name] = submit(tmp_path / name, target, *options)
    for name, job in jobs.items():
        log = check(cluster, job, tmp_path / name, expected, restarts=0)
        assert result(tmp_path / name / "run")["world_size"] == 2
        assert f"job {job} (start 1) on 2 node(s): n" in log
        assert "ended: completed, exit code 0" in log


def test_a_notice_stops_the_job_and_it_requeues_itself(submit, cluster, expected, tmp_path):
    job = submit(tmp_path, SLOW, *TWO_NODES, SLOW_S="0.1")
    wait_for_training(tmp_path)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    log = check(cluster, job, tmp_path, expected, restarts=1)
    assert "because of the notice: requeueing" in log
    stopped = events(tmp_path, "Finished")[0]
    assert stopped["reason"] == "preempted"
    assert events(tmp_path, "Resumed")[0]["step"] == stopped["step"]


@pytest.mark.slow
def test_a_requeue_from_outside(submit, cluster, expected, tmp_path):
    job = submit(tmp_path, SLOW, *TWO_NODES, SLOW_S="0.1")
    wait_for_training(tmp_path)
    cluster.run("scontrol", "requeue", job)
    check(cluster, job, tmp_path, expected, restarts=1)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_a_rank_is_killed_or_stopped(submit, cluster, expected, tmp_path, signum, victim):
    options = ("--nodes", "2", "--ntasks-per-node", "2", "--time", "10", "hang_timeout_s=2")
    job = submit(tmp_path, SLOW, *options, SLOW_S="0.1")
    wait_for_training(tmp_path)
    os.kill(next(r["pid"] for r in events(tmp_path, "Joined") if r["slot"] == victim), signum)
    check(cluster, job, tmp_path, expected, restarts=0)
    assert [row["slot"] for row in events(tmp_path, "RankLost")] == [victim]
    assert result(tmp_path / "run")["world_size"] == 3


@pytest.mark.slow
def test_a_killed_rank_is_replaced(submit, cluster, expected, tmp_path):
    options = ("--nodes", "2", "--ntasks-per-node", "2", "--time", "10", "--replace", "1")
    job = submit(tmp_path, SLOW, *options, SLOW_S="0.4")
    wait_for_training(tmp_path)
    os.kill(next(r["pid"] for r in events(tmp_path, "Joined") if r["slot"] == 3), signal.SIGKILL)
    check(cluster, job, tmp_path, expected, restarts=0)
    assert [row["slot"] for row in events(tmp_path, "Joined")] == [0, 1, 2, 3, 4]
    assert [row["world_size"] for row in events(tmp_path, "Recovered")] == [3, 4]


@pytest.mark.slow
def test_sigterm_to_the_script_stops_with_a_checkpoint(submit, cluster, tmp_path):
    job = submit(tmp_path, SLOW, *TWO_NODES, SLOW_S="0.1")
    wait_for_training(tmp_path)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    ended = cluster.wait_for_end(job, 60)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "143:0")
    assert result(tmp_path / "run")["status"] == "stopped"


@pytest.mark.slow
def test_a_cancelled_job_is_not_requeued(submit, cluster, tmp_path):
    job = submit(tmp_path, SLOW, *TWO_NODES, SLOW_S="0.1")
    wait_for_training(tmp_path)
    cluster.run("scancel", job)
    ended = cluster.wait_for_end(job, 60)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    wait_for(lambda: "ended:" in (tmp_path / f"job-{job}.log").read_text(), 30, "the script's end")


def test_the_time_limit(limited, cluster, expected):
    folder, job = limited
    log = check(cluster, job, folder, expected, restarts=1, timeout=150)
    assert "notice of the end" in log
    assert events(folder, "Finished")[0]["reason"] == "preempted"


@pytest.mark.slow
def test_lost_nodes(submit, cluster, expected, tmp_path):
    cluster.wait_until_idle()
    jobs, lost = {}, {}
    for which in ("first", "second"):
        (tmp_path / which).mkdir()
        # Both cores of each node, so that the jobs share none; with a thread each, as expected.
        options = (*TWO_NODES, "--cpus-per-task", "2", "threads=1")
        jobs[which] = submit(tmp_path / which, SLOW, *options, SLOW_S="0.15")
    for which, job in jobs.items():
        wait_for_training(tmp_path / which)
        nodelist = cluster.job(job)["NodeList"]
        nodes = cluster.run("scontrol", "show", "hostnames", nodelist).split()
        lost[which] = nodes[0] if which == "first" else nodes[1]
    try:
        for node in lost.values():
            cluster.kill_node(node)
        for which, job in jobs.items():
            check(cluster, job, tmp_path / which, expected, restarts=1)
    finally:
        for node in lost.values():
            cluster.start_node(node)


@pytest.mark.slow
def test_a_sweep_is_an_array_with_logs_beside_its_runs(cluster, expected, tmp_path):
    (tmp_path / "job.yaml").write_text('time: "10"\nnodes: 2\n')
    (tmp_path / "site.sh").write_text("#SBATCH --comment=mine\nexport FROM_SITE=1\n")
    # The first task is that of the reference.
    overrides = [item for item in OVERRIDES if not item.startswith("steps")]
    command = [sys.executable, "-m", "lockstep", "sweep", "digits", "steps=60,10", *overrides]
    options = ["--dir", "s", "--slurm", "job.yaml", "--submit", "--", "--nice=5"]
    (tmp_path / "job.yaml").write_text('time: "10"\nnodes: 2\nsetup: site.sh\n')
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=cluster.env, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    # `lockstep train` of another start writes into the same log: none of it is lost.
    wait_for(lambda: list((tmp_path / "s").glob("steps=*/result.json")), 120, "a result")
    wait_for(lambda: len(list((tmp_path / "s").glob("steps=*/result.json"))) == 2, 120, "both")
    known = cluster.job(f"{job}_0")
    assert (known["Comment"], known["Nice"]) == ("mine", "5")
    assert result(tmp_path / "s" / "steps=60")["params_sha256"] == expected
    assert result(tmp_path / "s" / "steps=60")["world_size"] == 2
    for number, name in enumerate(("steps=60", "steps=10")):
        log = tmp_path / "s" / f"{name}.log"
        wait_for(lambda log=log: "ended: completed" in log.read_text(), 60, "the log's end")
        assert f"job {job}_{number} (start 1)" in log.read_text()
        assert b"\0" not in log.read_bytes()
    again = subprocess.run(
        [*command, *options], cwd=tmp_path, env=cluster.env, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "left alone: steps=60 (completed)" in again.stdout
