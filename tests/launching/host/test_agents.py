"""Agents on one address: their ranks, spares, other runs, and the end of the coordinator."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import environment

from lockstep.launching.host.line import TOKEN
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import children, send

LOOP = """
import os, sys, time
from pathlib import Path
from lockstep.comm.torchdist.supervision import GenerationLost, Supervision

said = Path(sys.argv[1]) / os.environ["LOCKSTEP_LOCAL_RANK"]
line = Supervision(int(os.environ["LOCKSTEP_LOCAL_SUPERVISOR"]), lambda: None)
while True:
    generation, members = line.meet(True)
    with said.open("a") as file:
        print(os.getpid(), generation, *members, file=file)
    try:
        line.confirm()
        while not line.has_joiner:
            line.agree()
            time.sleep(0.01)
    except GenerationLost:
        pass
"""


class Run:
    """Agents of one run, each as on a host of its own."""

    def __init__(self, folder: Path, rendezvous: str = "") -> None:
        self.folder = folder
        (folder / "loop.py").write_text(LOOP)
        self.address = rendezvous or f"127.0.0.1:{free_port()}"

    def start(self, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "lockstep", "agent", "--rendezvous", self.address]
        argv += ["--hosts", "2", "--host-timeout", "2", *options]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*argv, "--", str(self.folder / "loop.py"), str(self.folder)],
                env=environment(cold=True) | variables, stdout=log, stderr=log,
            )  # fmt: skip

    def said(self, slot: int) -> list[list[str]]:
        """What a rank has written down: its process, a generation and its members."""
        path = self.folder / str(slot)
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, is_done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not is_done():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.01)

    def newest(self) -> list[str]:
        """The members of the newest generation, if it has reached them all."""
        slots = [int(path.name) for path in self.folder.glob("[0-9]*")]
        found = [line for slot in slots if (line := self.generation(slot))]
        number, *members = max(found, key=lambda line: int(line[0]), default=["0"])
        is_there = all(self.generation(int(slot)) == [number, *members] for slot in members)
        return members if is_there else []

    def generation(self, slot: int) -> list[str]:
        """The number of the newest generation of a rank, and its members."""
        return self.said(slot)[-1][1:] if self.said(slot) else []


def test_agents_come_go_and_end_with_the_coordinator(tmp_path: Path) -> None:
    run = Run(tmp_path)
    odd = {TOKEN: os.fsdecode(b"\xff")}  # no text
    first = run.start(**odd)
    run.wait_for(lambda: _listens(run.address))
    second, other = run.start(**odd), run.start("-n", "2", **odd)
    without = run.start()
    run.wait_for(lambda: run.generation(0) == ["1", "0", "1"])
    assert (other.wait(10), without.wait(10)) == (2, 2)
    assert (tmp_path / "log").read_text().count("the run begins when 2 hosts are") == 2
    spare = run.start(**odd)
    run.wait_for(lambda: "waits: it joins when" in (tmp_path / "log").read_text())
    # An agent that stands still is lost with its ranks; when it goes on, it is the spare.
    second.send_signal(signal.SIGSTOP)
    run.wait_for(lambda: run.generation(0) == ["3", "0", "2"])
    second.send_signal(signal.SIGCONT)
    run.wait_for(lambda: not _lives(run.said(1)[0][0]))
    spare.kill()
    run.wait_for(lambda: run.generation(0) == ["5", "0", "3"])
    first.kill()
    assert second.wait(10) == 75
    assert not any(_lives(pid) for slot in range(4) for pid, *_ in run.said(slot))
    assert (first.wait(10), spare.wait(10)) == (-9, -9)
    text = (tmp_path / "log").read_text()
    assert "the agent there has another run: ranks is 1 here, 2 there; " in text
    assert "LOCKSTEP_AGENTS_TOKEN differs between here and there; set the same one" in text
    assert "the coordinator has ended, and the run with it" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_where_all_have_stood_still_the_ranks_of_the_coordinator_stay(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.start()
    run.wait_for(lambda: _listens(run.address))
    second = run.start()
    run.wait_for(lambda: run.newest() == ["0", "1"])
    rank = run.said(0)[0][0]
    # Where the store is killed, all meet again in another one.
    store = next(filter(is_store, children(first.pid)))
    os.kill(store, signal.SIGKILL)
    run.wait_for(lambda: run.generation(0)[0] == "2" and run.newest() == ["0", "1"])
    assert [pid for pid in children(first.pid) if is_store(pid)] != [store]
    # Longer than --host-timeout, as where a machine is suspended or has far too much to do.
    everyone = [pid for agent in (first, second) for pid in (agent.pid, *children(agent.pid))]
    send(everyone, signal.SIGSTOP)
    time.sleep(3)
    send(everyone, signal.SIGCONT)
    run.wait_for(lambda: run.newest() == ["0", "2"])
    assert run.said(0)[-1][0] == rank
    first.kill()
    assert (first.wait(20), second.wait(20)) == (-9, 75)


@pytest.mark.slow
def test_a_signal_ends_agents_that_wait_and_those_that_train(tmp_path: Path) -> None:
    run = Run(tmp_path)
    alone = run.start()
    run.wait_for(lambda: _listens(run.address))
    alone.terminate()
    assert alone.wait(10) == 143
    both = [run.start()]
    run.wait_for(lambda: _listens(run.address))
    both.append(run.start())
    run.wait_for(lambda: run.generation(0))
    both[1].send_signal(signal.SIGINT)  # ends its rank, and the other goes on without it
    run.wait_for(lambda: run.generation(0)[0] == "2")
    both[1].terminate()  # it has no rank any more: one of another agent gets the signal
    assert [agent.wait(10) for agent in both] == [143, 143]


class Etcd:
    """Servers of etcd, which elect a leader of their own."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.ports = [(free_port(), free_port()) for _ in range(number)]
        self.processes = [self.start(n) for n in range(number)]
        self.addresses = ",".join(f"127.0.0.1:{port}" for port, _ in self.ports)

    def start(self, number: int) -> subprocess.Popen[bytes]:
        client, peer = (f"http://127.0.0.1:{port}" for port in self.ports[number])
        all_peers = [f"s{n}=http://127.0.0.1:{port}" for n, (_, port) in enumerate(self.ports)]
        argv = ["etcd", "--name", f"s{number}", "--data-dir", str(self.folder / f"etcd{number}")]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        argv += ["--initial-cluster", ",".join(all_peers)]
        with (self.folder / f"etcd{number}.log").open("ab") as log:
            return subprocess.Popen(bound_to_parent(argv), stdout=log, stderr=log)

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="Debian's package etcd-server has it")
def test_with_etcd_ranks_outlive_the_coordinator_and_a_server(tmp_path: Path) -> None:
    with Etcd(tmp_path, 3) as etcd:
        run = Run(tmp_path, f"etcd://{etcd.addresses}/run")
        options = ("--hosts", "3", "--host-timeout", "3")
        agents = [run.start(*options) for _ in range(3)]
        run.wait_for(lambda: run.newest() == ["0", "1", "2"])
        pids = {slot: run.said(slot)[0][0] for slot in range(3)}
        etcd.processes[0].kill()
        time.sleep(3)
        assert run.newest() == ["0", "1", "2"]
        owner = coordinator(agents)
        agents[owner].kill()
        agents[owner].wait()
        run.wait_for(lambda: len(run.newest()) == 2)
        lost = next(slot for slot in range(3) if str(slot) not in run.newest())
        assert not _lives(pids[lost])
        assert all(_lives(pid) for slot, pid in pids.items() if slot != lost)
        agents[owner] = run.start(*options)
        run.wait_for(lambda: len(run.newest()) == 3)
        etcd.processes[0].wait()
        etcd.processes[0] = etcd.start(0)
        # Without a majority nobody forms a group, and a loss ends the run.
        etcd.processes[1].kill()
        etcd.processes[2].kill()
        run.wait_for(lambda: not any(_lives(pid) for pid in pids.values()))
        for agent in agents:
            agent.terminate()
        assert {agent.wait(20) for agent in agents} == {143}


def coordinator(agents: list[subprocess.Popen[bytes]]) -> int:
    """Which agent is the coordinator's home: the store is a child of it."""
    return next(n for n, agent in enumerate(agents) if any(map(is_store, children(agent.pid))))


def is_store(pid: int) -> bool:
    return b"hosted_store" in Path(f"/proc/{pid}/cmdline").read_bytes()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _listens(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


def _lives(pid: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe") != ""
    except OSError:
        return False
