"""Agents on the hosts of a lab, and what can go wrong there."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import environment, result

from lockstep.launching.host.processes import children, is_alive, variable
from lockstep.observe import read_events

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


class Agents:
    """Agents on the hosts of a lab, of one run."""

    def __init__(self, lab, folder, *options, train=(), rendezvous=f"h0:{PORT}"):
        self.lab, self.folder = lab, folder
        folder.mkdir(exist_ok=True)
        (folder / "slow.py").write_text(TASK)
        (folder / "slowly").touch()
        self.options = [
            "--rendezvous", rendezvous, "--hosts", str(lab.num_hosts), "-n", "1",
            "--host-timeout", str(TIMEOUT_S), *options, "--", "train", "slow.py:Slow", *train,
            "--run-dir", "run",
        ]  # fmt: skip
        self.processes = {}

    def start(self, host, *more):
        argv = [sys.executable, "-m", "lockstep", "agent", *more, *self.options]
        with (self.folder / "log").open("ab") as log:
            self.processes[host] = subprocess.Popen(
                self.lab.command(host, argv), cwd=self.folder, env=environment(cold=True),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def coordinator(self):
        """The host of the coordinator: the store is a child of its agent."""
        pids = {host: process.pid for host, process in self.processes.items()}
        lines = {
            host: [Path(f"/proc/{child}/cmdline").read_bytes() for child in children(pid)]
            for host, pid in pids.items()
        }
        return next(host for host, found in lines.items() if b"hosted_store" in b"".join(found))

    def on_host(self, host):
        argv = ["ip", "netns", "pids", f"{self.lab.name}-h{host}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split() if is_alive(int(pid))]

    def kill(self, host, only_ranks=False):
        for pid in self.on_host(host):
            is_rank = variable(pid, "LOCKSTEP_LOCAL_RANK")
            if is_rank or not only_ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not only_ranks:
            self.processes.pop(host).wait()

    def cable(self, host, state):
        inside = ["ip", "netns", "exec", f"{self.lab.name}-h{host}", "ip", "link", "set", "eth0"]
        subprocess.run([*inside, state], check=True)

    def rows(self, kind):
        path = self.folder / "run" / "events.jsonl"
        return [row for row in read_events(path) if row["event"] == kind] if path.exists() else []

    def step(self):
        return max((row["step"] for row in self.rows("StepDone")), default=0)

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

    def sizes(self):
        """The numbers of ranks that the run has had."""
        return [row["world_size"] for row in self.rows("Recovered")]

    def codes(self, seconds=60.0):
        """The exit codes of the agents, host by host, once the run has gone on at full speed."""
        (self.folder / "slowly").unlink(missing_ok=True)
        return [self.processes[host].wait(seconds) for host in sorted(self.processes)]

    def said(self):
        return (self.folder / "log").read_text(errors="replace")[-6000:]


@contextlib.contextmanager
def etcd(lab, folder):
    """A server of etcd on each host of a lab; yields where agents meet by them."""
    hosts, servers = range(lab.num_hosts), []
    for host in hosts:
        client, peer = (f"http://{lab.address(host)}:{port}" for port in (2379, 2380))
        argv = ["etcd", "--name", f"h{host}", "--data-dir", str(folder / f"etcd{host}")]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        peers = ",".join(f"h{other}=http://{lab.address(other)}:2380" for other in hosts)
        command = lab.command(host, [*argv, "--initial-cluster", peers])
        with (folder / f"etcd{host}.log").open("ab") as log:
            servers.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        yield "etcd://" + ",".join(f"h{host}:2379" for host in hosts) + "/run"
    finally:
        for server in servers:
            server.kill()
            server.wait()


def sha_alone(folder, *items):
    """The SHA-256 of the run on one rank."""
    (folder / "slow.py").write_text(TASK)
    argv = [sys.executable, "-m", "lockstep", "train", "slow.py:Slow", *items, "--run-dir", "run"]
    subprocess.run(argv, cwd=folder, env=environment(), check=True, capture_output=True)
    return result(folder / "run")["params_sha256"]
