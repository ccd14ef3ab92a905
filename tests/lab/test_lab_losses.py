"""The job script of `lockstep slurm` on three hosts, one of which dies or is cut off."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from benchmarks.lab import Lab
from tests.conftest import environment

from lockstep.launching.host.processes import is_alive
from lockstep.observe import read_events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_has_what_hosts_need")]

TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep as ls

class Slow(ls.Task):
    class Config(ls.TrainConfig):
        batch_size: int = 6
        num_microbatches: int = 3
        steps: int = 10_000
        log_every: int = 1
    def build_model(self): return nn.Linear(4, 1)
    def dataset(self, split):
        return TensorDataset(torch.ones(12, 4)) if split == "train" else None
    def loss(self, model, batch):
        time.sleep(0.04)
        return ls.Loss(model(batch[0]).sum(), len(batch[0]))
"""


def on_host(lab, host):
    """The processes of a host."""
    argv = ["ip", "netns", "pids", f"{lab.name}-h{host}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return [int(pid) for pid in done.stdout.split() if is_alive(int(pid))]


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut_off(lab, host):
    namespace = ["ip", "netns", "exec", f"{lab.name}-h{host}"]
    subprocess.run([*namespace, "ip", "link", "set", "eth0", "down"], check=True)


def steps(run):
    events = run / "events.jsonl"
    return max((row["step"] for row in read_events(events)), default=0) if events.exists() else 0


@pytest.mark.parametrize("loss", ["killed", "cut off"])
def test_a_lost_host_is_noticed_the_job_is_requeued_and_nothing_stays_behind(tmp_path, loss):
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "hosts").write_text("".join(f"h{host} slots=1\n" for host in range(3)))
    run, script = tmp_path / "run", tmp_path / "job.sbatch"
    subprocess.run(
        [sys.executable, "-m", "lockstep", "slurm", "slow.py:Slow", "hang_timeout_s=8",
         "checkpoint.every=5", "--nodes", "3", "--ntasks-per-node", "1", "--time", "1:00:00",
         "--run-dir", str(run), "--output", str(script)],
        cwd=tmp_path, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    with Lab(3) as lab, (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            lab.command(0, ["bash", str(script)]),
            env=environment(
                cold=True,
                PRTE_MCA_prte_default_hostfile=str(tmp_path / "hosts"),
                PRTE_MCA_plm_ssh_agent=lab.agent(),
                OMPI_MCA_btl_tcp_if_include="eth0",
                OMPI_ALLOW_RUN_AS_ROOT="1",
                OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while steps(run) < 12:
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        lost_at = time.monotonic()
        if loss == "killed":
            kill(on_host(lab, 2))
        else:
            cut_off(lab, 2)
        assert job.wait(60) not in (0, 2)
        took_s = time.monotonic() - lost_at
        while any(on_host(lab, host) for host in range(3)):
            assert time.monotonic() < lost_at + took_s + 10, "a host's processes stay behind"
            time.sleep(0.1)
    said = (tmp_path / "log").read_text(errors="replace")
    assert "lost a rank or a node; the newest checkpoint is used" in said
    assert took_s < 20
    if loss == "cut off":
        assert "on node h2" in said
