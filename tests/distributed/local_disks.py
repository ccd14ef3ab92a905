"""Hosts with run directories of their own, played by agents of this machine in folders apart."""

import hashlib
import shutil
import socket
import time

from tests.conftest import environment, result
from tests.lab.agents import TASK
from tests.launching.host.test_agents import free_port

from lockstep.cli.prove.chaos_hosts import Hosts
from lockstep.engine.faults import to_env
from lockstep.observe import read_events


class Disks(Hosts):
    """The hosts of one run; each has a folder `h<number>` with the task and the run directory."""

    def __init__(
        self, folder, num_hosts, *keys, hosts=None, num_ranks=1, faults=(), rendezvous="",
        copies=2, task="slow.py:Slow",
    ):  # fmt: skip
        self.known = [*range(num_hosts)] if hosts is None else hosts
        for host in self.known:
            self.place(folder, host)
        self.port = free_port()
        where = rendezvous or f"127.0.0.1:{self.port}"
        options = ["--rendezvous", where, "--wait", "20"]
        train = ["train", task, "--resume", *keys, f"checkpoint.copies={copies}", "--run-dir"]
        first = self.known[0]
        super().__init__(
            folder, num_hosts, num_ranks, 2.0, options, [*train, "run"],
            folder / f"h{first}" / "run", folder / "log",
            environment(cold=bool(rendezvous)) | to_env(faults, folder / "faults"),
        )  # fmt: skip

    @staticmethod
    def place(folder, host):
        """Make the folder of a host, if it is not there."""
        own = folder / f"h{host}"
        own.mkdir(parents=True, exist_ok=True)
        (own / "slow.py").write_text(TASK)

    def on(self, host, argv):
        return ["env", "-C", str(self.folder / f"h{host}"), *argv]

    def begin(self):
        """Start all agents; the first one has the coordinator, and the first ranks."""
        for number, host in enumerate(self.known):
            self.start(host)
            deadline = time.monotonic() + 20
            while number == 0 and not self._listens():
                assert time.monotonic() < deadline, self.said()
                time.sleep(0.02)
        return self

    def _listens(self):
        if self.has_election:
            return True
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def run_of(self, host):
        return self.folder / f"h{host}" / "run"

    def lose(self, host):
        """Kill all processes of a host, and remove its disk."""
        if host in self.agents:
            self.kill(host)
        shutil.rmtree(self.folder / f"h{host}")
        self.place(self.folder, host)

    def slow_down(self, is_slow=True):
        for host in self.known:
            flag = self.folder / f"h{host}" / "slowly"
            if is_slow:
                flag.touch()
            else:
                flag.unlink(missing_ok=True)

    def wait_for(self, is_done, seconds=60.0):
        deadline = time.monotonic() + seconds
        while not is_done():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def ended(self, timeout_s=90.0):
        """The exit codes of the agents by host."""
        return self.codes(timeout_s)


def sha_alone(folder, lockstep, *keys):
    """The SHA-256 of the run on one rank."""
    Disks.place(folder, "alone")
    argv = ["train", folder / "halone" / "slow.py:Slow", *keys, "--run-dir", folder / "alone"]
    ended = lockstep(*argv)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return result(folder / "alone")["params_sha256"]


def files(run_dir):
    """Digests of the files of all checkpoints, by name."""
    root = run_dir / "checkpoints"
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.glob("step_*/*")
    }


def steps(run_dir):
    """The steps that its events have committed, in order."""
    return [r["step"] for r in read_events(run_dir / "events.jsonl") if r["event"] == "StepDone"]


def warnings(run_dir):
    rows = read_events(run_dir / "events.jsonl")
    return [row["message"] for row in rows if row["event"] == "Warned"]


def newest(run_dir):
    """The name of the newest checkpoint; empty if there is none."""
    return max((p.name for p in (run_dir / "checkpoints").glob("step_*")), default="")
