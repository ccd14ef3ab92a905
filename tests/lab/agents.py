"""Agents on the hosts of a lab, and what can go wrong there."""

import os
import signal
import subprocess
import sys
import time

from tests.conftest import environment, result

from lockstep.cli.prove.chaos_hosts import Hosts

TASK = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep as ls

class Slow(ls.Task):
    class Config(ls.TrainConfig):
        batch_size: int = 6
        num_microbatches: int = 3
        steps: int = 1500
        log_every: int = 1
        lr: float = 0.01
    def build_model(self): return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    def dataset(self, split):
        numbers = torch.arange(48.0).reshape(12, 4).sin()
        return TensorDataset(numbers) if split == "train" else None
    def loss(self, model, batch):
        if Path("slowly").exists():
            time.sleep(0.03)
        return ls.Loss(model(batch[0]).square().sum(), len(batch[0]))
"""
TIMEOUT_S = 2.0
PORT = 29500


class Agents(Hosts):
    """Agents on the hosts of a lab, of one run."""

    def __init__(
        self, lab, folder, *options, train=(), rendezvous=f"h0:{PORT}", timeout_s=TIMEOUT_S,
        task=TASK, run_dir="run",
    ):  # fmt: skip
        self.lab = lab
        folder.mkdir(exist_ok=True)
        (folder / "slow.py").write_text(task)
        (folder / "slowly").touch()
        super().__init__(
            folder, lab.num_hosts, 1, timeout_s, ["--rendezvous", rendezvous, *options],
            ["train", "slow.py:Slow", *train, "--run-dir", run_dir], folder / run_dir,
            folder / "log", environment(cold=True),
        )  # fmt: skip

    def on(self, host, argv):
        return self.lab.command(host, argv)

    def kill_ranks(self, host):
        for pid in self.ranks(host):
            os.kill(pid, signal.SIGKILL)

    def inside(self, host, *argv):
        """Run a program in the network of a host."""
        command = ["ip", "netns", "exec", f"{self.lab.name}-h{host}", *argv]
        subprocess.run(command, check=True, capture_output=True)

    def cable(self, host, state):
        self.inside(host, "ip", "link", "set", "eth0", state)

    def wait_for(self, is_done, seconds=40.0):
        began = time.monotonic()
        while not is_done():
            assert time.monotonic() < began + seconds, self.said()
            time.sleep(0.02)
        return time.monotonic() - began

    def advance(self, num_steps=3):
        """Wait for further steps; how many seconds the first took."""
        step = self.step()
        seconds = self.wait_for(lambda: self.step() > step)
        self.wait_for(lambda: self.step() >= step + num_steps)
        return seconds

    def ended(self, timeout_s=60.0):
        """The exit codes of the agents, host by host, once the run has gone on at full speed."""
        (self.folder / "slowly").unlink(missing_ok=True)
        return self.codes(timeout_s)


class Etcd:
    """A server of etcd on each host of a lab, while the context lasts."""

    def __init__(self, lab, folder):
        self._lab, self._folder = lab, folder
        self._servers = {}

    def __enter__(self):
        for host in range(self._lab.num_hosts):
            self.start(host)
        return self

    def __exit__(self, *_):
        for host in self._servers:
            self.kill(host)

    @property
    def rendezvous(self):
        return "etcd://" + ",".join(f"h{host}:2379" for host in range(self._lab.num_hosts)) + "/run"

    def start(self, host):
        client, peer = (f"http://{self._lab.address(host)}:{port}" for port in (2379, 2380))
        argv = ["etcd", "--name", f"h{host}", "--data-dir", str(self._folder / f"etcd{host}")]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        names = range(self._lab.num_hosts)
        peers = ",".join(f"h{other}=http://{self._lab.address(other)}:2380" for other in names)
        command = self._lab.command(host, [*argv, "--initial-cluster", peers])
        with (self._folder / f"etcd{host}.log").open("ab") as log:
            self._servers[host] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, host):
        self._servers[host].kill()
        self._servers[host].wait()


def sha_alone(folder, *items):
    """The SHA-256 of the run on one rank."""
    (folder / "slow.py").write_text(TASK)
    argv = [sys.executable, "-m", "lockstep", "train", "slow.py:Slow", *items, "--run-dir", "run"]
    subprocess.run(argv, cwd=folder, env=environment(), check=True, capture_output=True)
    return result(folder / "run")["params_sha256"]
