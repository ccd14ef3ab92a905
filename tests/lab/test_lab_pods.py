"""Pods of a Job for Kubernetes, played by network namespaces, each with processes of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from benchmarks.lab import Lab
from benchmarks.lab.leftovers import FILES
from tests.conftest import environment, result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_has_what_hosts_need")]

RANKS = 3
LOST, STOPPED = 75, 143


class Pods:
    """The pods of a manifest, which are started again as the Job's controller does."""

    def __init__(self, lab, folder, manifest):
        objects = yaml.safe_load_all(manifest.read_text())
        job = next(one for one in objects if one["kind"] == "Job")
        (rank,) = job["spec"]["template"]["spec"]["containers"]
        self.lab, self.folder = lab, folder
        self.env = {one["name"]: one["value"] for one in rank["env"]}
        argv = [word.replace("/runs", str(folder)) for word in rank["command"][1:]]
        self.argv = [sys.executable, "-m", "lockstep", *argv]
        for host in range(RANKS):
            hosts = FILES / f"{lab.name}-h{host}" / "hosts"
            name = self.env["MASTER_ADDR"]
            hosts.write_text(f"{hosts.read_text()}{lab.address(0)} {name}\n")

    def start(self):
        """Start all pods; their first process has number 1 in them."""
        return [self._start(host) for host in range(RANKS)]

    def _start(self, host):
        alone = ["unshare", "--pid", "--fork", "--kill-child"]
        env = {**environment(cold=True), **self.env, "JOB_COMPLETION_INDEX": str(host)}
        with (self.folder / f"said{host}").open("a") as said:
            return subprocess.Popen(
                self.lab.command(host, [*alone, *self.argv]),
                env=env, cwd=self.folder, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_for_steps(self, number):
        """Wait until so many steps are reported in the run directory."""
        events = self.folder / "digits" / "events.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if events.exists() and events.read_text().count('"StepDone"') >= number:
                return
            time.sleep(0.05)
        raise AssertionError("no steps: " + (self.folder / "said0").read_text())


def first_process(pod):
    """The outer number of a pod's first process."""
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    return int(children[0])


def codes(pods):
    return [pod.wait(timeout=90) for pod in pods]


def test_pods_meet_stop_in_the_grace_period_and_go_on_after_a_loss(tmp_path):
    keys = ["num_microbatches=6", "steps=400", "log_every=1", "checkpoint.every=20"]
    made = subprocess.run(
        [sys.executable, "-m", "lockstep", "kubernetes", "digits", "-n", str(RANKS), "--image", "x",
         *keys], cwd=tmp_path, env=environment(cold=True), capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with Lab(RANKS, "1gbit") as lab:
        pods = Pods(lab, tmp_path, tmp_path / "digits.yaml")
        started = pods.start()
        pods.wait_for_steps(30)
        os.kill(first_process(started[1]), signal.SIGTERM)  # as of a node that is drained
        assert codes(started) == [STOPPED] * RANKS
        started = pods.start()
        pods.wait_for_steps(90)
        os.kill(first_process(started[2]), signal.SIGKILL)
        ended = codes(started)
        assert ended[:2] == [LOST] * 2
        assert ended[2] not in (0, LOST)
        assert codes(pods.start()) == [0] * RANKS
    run_dir = tmp_path / "digits"
    alone = [sys.executable, "-m", "lockstep", "train", "digits", *keys, "--run-dir", "alone"]
    subprocess.run(alone, cwd=tmp_path, env=environment(cold=True), check=True)
    assert result(run_dir)["params_sha256"] == result(tmp_path / "alone")["params_sha256"]
