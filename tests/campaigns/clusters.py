"""`python -m tests.campaigns.clusters slurm|ray`: random faults on two nodes of a cluster.

SLURM is that of Debian's packages, with an agent as a step on each node; Ray is that of the extra,
whose driver starts an agent as an actor on each node. What strikes is what these platforms allow:
ranks, agents, stores, daemons and whole nodes are killed and come back, daemons are stopped, steps
are killed and cancelled, nodes are removed and added. Each run is checked as in
`tests.campaigns.hosts`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.cli.prove.chaos_host_faults import Faults, Kind, Struck, Undo, end
from lockstep.cli.prove.chaos_hosts import Hosts
from lockstep.errors import LaunchError
from lockstep.launching.host.processes import children, is_alive, variable
from tests.campaigns.commits import NOTED
from tests.campaigns.hosts import report, strike
from tests.conftest import environment
from tests.launching.host.test_agents import Etcd, free_port
from tests.launching.ray_nodes import Nodes
from tests.slurm.cluster import NODES, Cluster, install, parent, running

_STEPS = 2500
_TIMEOUT_S = 3.0
_STOPPED = 128 + signal.SIGTERM
_BLINK_S = 1.0
"""Much less than what a node has until SLURM takes it to be lost."""


class OnCluster(Hosts):
    """Two nodes with a rank each, and what each rank commits."""

    def __init__(self, folder: Path, options: list[str], env: dict[str, str]) -> None:
        folder.mkdir()
        (folder / "commits").mkdir()
        (folder / "slow.py").write_text(NOTED)
        (folder / "slowly").touch()
        self._sessions = -1
        self.count_session(folder)
        command = ["train", "slow.py:Slow", f"steps={_STEPS}", "checkpoint.every=50"]
        super().__init__(
            folder, 2, 1, _TIMEOUT_S, options, [*command, "--run-dir", "run", "--resume"],
            folder / "run", folder / "log", env,
        )  # fmt: skip
        self.command = command

    def count_session(self, folder: Path) -> None:
        """Have ranks that start from now on write down that all have started again."""
        self._sessions += 1
        (folder / "session").write_text(str(self._sessions))

    def resume(self) -> None:
        self.count_session(self.folder)
        super().resume()

    def ended(self, timeout_s: float) -> list[int]:
        """The exit codes, once the run has gone on at full speed."""
        (self.folder / "slowly").unlink(missing_ok=True)
        return self.codes(timeout_s)


class OnSlurm(OnCluster):
    """An agent on each of two nodes, in a job of its own."""

    def __init__(self, cluster: Cluster, folder: Path, etcd: Etcd | None) -> None:
        self.cluster = cluster
        self._port = free_port()
        where = f"etcd://{etcd.addresses}/run" if etcd else f"127.0.0.1:{self._port}"
        options = ["--rendezvous", where, "--id", "campaign", "--replace", "99", "--wait", "60"]
        super().__init__(folder, options, environment(cold=True) | cluster.env)

    def on(self, host: int, argv: Any) -> list[str]:
        place = f"--nodelist={NODES[host]}"
        return ["srun", "--quiet", "--nodes=1", "--ntasks=1", place, f"--job-name=h{host}", *argv]

    def start(self, host: int, *options: str) -> None:
        self.cluster.start_node(NODES[host])
        # All nodes have one address, and it is the first one's by right.
        deadline = time.monotonic() + 30
        while host and not self.has_election and not self._listens():
            if time.monotonic() > deadline:
                raise LaunchError(f"nobody listens at port {self._port}{self.told}")
            time.sleep(0.05)
        super().start(host, *options)

    def _listens(self) -> bool:
        return f":{self._port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()

    def agent(self, host: int) -> int | None:
        """The process of a node's agent, on the node itself."""
        pids = self.pids(host)
        return next((pid for pid in pids if b"\0agent\0" in _command(pid)), None)

    def pids(self, host: int) -> list[int]:
        return [pid for pid in super().pids(host) if variable(pid, "SLURMD_NODENAME")]

    def ranks(self, host: int) -> list[int]:
        agent = self.agent(host)
        return [p for p in children(agent) if variable(p, "LOCKSTEP_LOCAL_RANK")] if agent else []

    def store(self, host: int) -> int | None:
        agent = self.agent(host)
        return next((p for p in children(agent or 0) if b"hosted_store" in _command(p)), None)

    def job(self, host: int) -> str:
        """The number of a node's job."""
        asked = ["squeue", "--noheader", "--format=%i", "--states=RUNNING", f"--name=h{host}"]
        return self.cluster.run(*asked).strip()


class SlurmFaults(Faults):
    """What may happen to steps and nodes of SLURM."""

    hosts: OnSlurm

    def __init__(self, run: OnSlurm, source: random.Random) -> None:
        super().__init__(run, source)
        self.kinds |= {
            "step": Kind(2, self._kill_step, ends=True),
            "slurmd": Kind(2, self._kill_daemon, lasts=False, loses=False),
            "stopped": Kind(2, self._stop_daemon, lasts=False, loses=False),
            "cancel": Kind(1, self._cancel, only=True),
        }

    def _with_target(self, name: str, hosts: Sequence[int]) -> list[int]:
        # The job of a node that has just come back may still be waiting for it.
        found = super()._with_target(name, hosts)
        needs_agent = name in ("agent", "step")
        return [host for host in found if not needs_agent or self.hosts.agent(host) is not None]

    def _kill_agent(self, host: int) -> Undo:
        pid = self.hosts.agent(host)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        self.hosts.agents[host].wait()
        return lambda: self.hosts.start(host)

    def _kill_host(self, host: int) -> Undo:
        """The whole node: its daemon, and all that runs there."""
        node = NODES[host]
        self.hosts.cluster.kill_node(node)
        self.hosts.agents[host].kill()  # the client, which is on no node
        self.hosts.agents[host].wait()
        self.hosts.cluster.run("scancel", f"--name=h{host}")
        return lambda: self.hosts.start(host)

    def _kill_step(self, host: int) -> Undo:
        self.hosts.cluster.run("scancel", "--signal=KILL", f"{self.hosts.job(host)}.0")
        self.hosts.agents[host].wait()
        return lambda: self.hosts.start(host)

    def _kill_daemon(self, host: int) -> None:
        self.hosts.cluster.kill_daemon(NODES[host])
        time.sleep(_BLINK_S)
        self.hosts.cluster.start_node(NODES[host])

    def _stop_daemon(self, host: int) -> None:
        self.hosts.cluster.signal_daemon(NODES[host], signal.SIGSTOP)
        time.sleep(_BLINK_S)
        self.hosts.cluster.signal_daemon(NODES[host], signal.SIGCONT)

    def _cancel(self, host: int) -> None:
        """A cancelled step stops the run everywhere, with a checkpoint."""
        assert self._now is not None
        self._now.has_ended = True
        self.undo_all()
        self.hosts.cluster.run("scancel", "--signal=TERM", f"{self.hosts.job(host)}.0")
        codes = self.hosts.codes(60)
        if set(codes) != {_STOPPED}:
            raise LaunchError(f"agents of a cancelled step ended with {codes}{self.hosts.told}")
        self.hosts.check_gone()
        self.hosts.resume()


class OnRay(OnCluster):
    """`lockstep train --launcher ray`: its first node is the head, which stays."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes = nodes
        super().__init__(folder, [], environment(cold=True))

    def start(self, host: int, *options: str) -> None:
        if host:
            return
        argv = [sys.executable, "-m", "lockstep", *self.command, "--run-dir", "run", "--resume"]
        argv += ["--launcher", "ray", "-n", "2", "--ray-address", self.nodes.address]
        with self.log.open("ab") as log:
            self.agents[0] = subprocess.Popen(
                [*argv, "--replace", "99"], cwd=self.folder, env=self.environment(0),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ranks(self, host: int) -> list[int]:
        self._read()
        living = [pid for pid in self._joined.values() if is_alive(pid)]
        return [pid for pid in living if (b"--head" in _command(ancestor(pid, 3))) == (host == 0)]

    def store(self, host: int) -> int | None:
        if host:
            return None
        drivers = children(self.agents[0].pid)
        return next(
            (p for d in drivers for p in children(d) if b"hosted_store" in _command(p)), None
        )

    def coordinator(self) -> int | None:
        return None

    def check_gone(self) -> None:
        deadline = time.monotonic() + 20
        while self.nodes.do("left") != {"groups": 0, "busy": 0}:
            if time.monotonic() > deadline:
                raise LaunchError(f"Ray has not got back everything{self.told}")
            time.sleep(0.5)


class RayFaults(Faults):
    """What may happen to actors and nodes of Ray; the command itself is started again."""

    hosts: OnRay

    def __init__(self, run: OnRay, source: random.Random) -> None:
        super().__init__(run, source)
        self.kinds = {
            "rank": Kind(3, self._kill_rank, lasts=False),
            "agent": Kind(2, partial(self._kill_above, 1), lasts=False),
            "actor": Kind(2, partial(self._kill_above, 2), lasts=False),
            "node": Kind(3, self._remove),
            "store": Kind(1, self._kill_store, lasts=False, loses=False),
            "command": Kind(1, self._kill_command, lasts=False, loses=False),
        }

    def _victims(self, name: str, kind: Kind) -> list[int]:
        if name == "command":
            return [] if self._lasting else [0]
        found = super()._victims(name, kind)
        return [host for host in found if host == 1] if name == "node" else found

    def _kill_above(self, generations: int, host: int) -> None:
        for rank in self.hosts.ranks(host):
            end(ancestor(rank, generations))
            end(rank)

    def _remove(self, host: int) -> Undo:
        self.hosts.nodes.do("remove")
        return lambda: self.hosts.nodes.do("add")

    def _kill_command(self, host: int) -> None:
        assert self._now is not None
        self._now.has_ended = True
        self.hosts.agents[host].kill()
        self.hosts.agents[host].wait()
        self.hosts.check_gone()
        self.hosts.resume()


def ancestor(pid: int, generations: int) -> int:
    """The parent of a process, or of its parent; 0 if there is none."""
    for _ in range(generations):
        pid = parent(pid)
    return pid


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def main() -> int:
    """Strike runs until there were enough faults; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="tests.campaigns.clusters", description=__doc__)
    parser.add_argument("platform", choices=["slurm", "ray"])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--etcd", action="store_true", help="on SLURM, have any node be lost")
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)

    def on_slurm(root: Path, sha: str, most: int) -> Iterator[Struck | str]:
        if reason := install():
            raise SystemExit(f"no SLURM: {reason}")
        with running() as cluster, contextlib.ExitStack() as stack:
            etcd = stack.enter_context(Etcd(root, 1)) if arguments.etcd else None
            run = OnSlurm(cluster, root / "hosts", etcd)
            for host in range(2):
                run.start(host)
            yield from strike(run, SlurmFaults(run, source), most, sha, _STEPS)

    def on_ray(root: Path, sha: str, most: int) -> Iterator[Struck | str]:
        with contextlib.closing(Nodes(2)) as nodes:
            run = OnRay(nodes, root / "hosts")
            run.start(0)
            try:
                yield from strike(run, RayFaults(run, source), most, sha, _STEPS)
            finally:
                run.agents[0].kill()
                run.agents[0].wait()

    runs = on_slurm if arguments.platform == "slurm" else on_ray
    return report(arguments.seed, arguments.faults, _STEPS, runs)


if __name__ == "__main__":
    sys.exit(main())
