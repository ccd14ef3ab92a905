"""Hosts of a run under `lockstep agent`.

Here a host is an agent with all processes that come from it, on this machine.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import (
    children,
    is_alive,
    kill_marked,
    marked,
    send,
    variable,
)
from lockstep.launching.host.supervisor import RANK

_HOST = "CHAOS_HOST"
"""Environment variable by which the processes of a host are found, also those without a parent."""
_STORE = b"hosted_store"
"""In the command line of the process in which ranks find each other."""
POLL_S = 0.02
_GONE_S = 10.0
"""Seconds in which processes have to be gone whose agent has ended."""


class Hosts:
    """The hosts of one run.

    Args:
        folder: where agents run.
        num_hosts: number of hosts.
        num_ranks: number of ranks on each.
        timeout_s: seconds after which a silent host is lost.
        options: arguments of all agents, beside those that follow from the others.
        command: what each rank runs; with `--resume`, since all may have to start again.
        run_dir: its run directory.
        log: the file that gets what agents and ranks say.
        env: environment variables of the agents.

    Attributes:
        agents: the newest agent of each host.
        has_election: whether another host may become the coordinator.
    """

    def __init__(
        self,
        folder: Path,
        num_hosts: int,
        num_ranks: int,
        timeout_s: float,
        options: Sequence[str],
        command: Sequence[str],
        run_dir: Path,
        log: Path,
        env: Mapping[str, str],
    ) -> None:
        self.log, self.run_dir = log, run_dir
        self.folder, self.num_hosts, self.num_ranks = folder, num_hosts, num_ranks
        self.timeout_s = timeout_s
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.has_election = any("etcd://" in option for option in options)
        self._argv = [
            *("--hosts", str(num_hosts), "-n", str(num_ranks)),
            *("--host-timeout", f"{timeout_s:g}", *options, "--", *command),
        ]
        self._env = dict(env)
        self._id = uuid.uuid4().hex
        self._rows: list[dict[str, Any]] = []
        self._joined: dict[int, int] = {}
        self._offset = self._step = 0

    def on(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on a host, without a process between."""
        return list(argv)

    def environment(self, host: int) -> dict[str, str]:
        """Environment variables of an agent."""
        return self._env | {_HOST: self._mark(host)}

    def start(self, host: int, *options: str) -> None:
        """Start the agent of a host, with further options."""
        agent = [sys.executable, "-m", "lockstep", "agent", *options, *self._argv]
        argv = bound_to_parent(agent)
        with self.log.open("ab") as log:
            self.agents[host] = subprocess.Popen(
                self.on(host, argv), cwd=self.folder, env=self.environment(host),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def resume(self) -> None:
        """Start all agents again after the end of all, from the newest checkpoint."""
        self._read()
        self._joined.clear()
        for host in range(self.num_hosts):
            self.start(host)

    def said(self) -> str:
        """The end of what agents and ranks have said."""
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")[-6000:]
        return ""

    @property
    def told(self) -> str:
        """The end of that, to be added to a message: the file may be gone when it is read."""
        return f"; the newest lines of {self.log.name}:\n{self.said()[-2000:]}"

    def pids(self, host: int) -> list[int]:
        """The living processes of a host."""
        return marked(self._mark(host), _HOST)

    def ranks(self, host: int) -> list[int]:
        """The processes of a host that are ranks, as long as its agent is there."""
        agent = self.agents.get(host)
        return [p for p in children(agent.pid) if variable(p, RANK)] if agent else []

    def coordinator(self) -> int | None:
        """The host of the coordinator: that of the store; None while there is none."""
        return next((host for host in self.agents if self.store(host) is not None), None)

    def store(self, host: int) -> int | None:
        """The process of a host in which ranks find each other, if it is there."""
        for pid in children(self.agents[host].pid):
            with contextlib.suppress(OSError):
                if _STORE in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once, and wait until they are gone."""
        send(self.pids(host), signal.SIGKILL)
        kill_marked(self._mark(host), name=_HOST)
        self.agents[host].wait()

    def kill_all(self) -> None:
        """Kill all processes of all hosts."""
        for host in self.agents:
            self.kill(host)

    def check_gone(self) -> None:
        """Make sure that no process has outlived its agent for long.

        Raises:
            LaunchError: some have.
        """
        deadline = time.monotonic() + _GONE_S
        while left := [pid for host in self.agents for pid in self.pids(host)]:
            if time.monotonic() > deadline:
                raise LaunchError(f"processes {left} have outlived their agents{self.told}")
            time.sleep(POLL_S)

    def all_rows(self) -> list[dict[str, Any]]:
        """The events of the run by now."""
        self._read()
        return list(self._rows)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [row for row in self.all_rows() if row["event"] == kind]

    def step(self) -> int:
        """The newest step."""
        self._read()
        return self._step

    def holders(self, host: int) -> list[int]:
        """The ranks of a host that have the state of the run."""
        self._read()
        return [p for p in self.ranks(host) if p in self._joined.values() and is_alive(p)]

    def _read(self) -> None:
        with contextlib.suppress(OSError), (self.run_dir / "events.jsonl").open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(end)
            for row in map(json.loads, whole.splitlines()):
                self._rows.append(row)
                if row["event"] == "StepDone":
                    self._step = int(row["step"])
                elif row["event"] == "Joined":
                    self._joined[row["slot"]] = row["pid"]
                elif row["event"] == "RankLost":
                    self._joined.pop(row["slot"], None)

    def are_over(self) -> bool:
        """Whether the run has ended on some host, though nothing has struck there."""
        return any(agent.poll() == 0 for agent in self.agents.values())

    def codes(self, timeout_s: float) -> list[int]:
        """The exit codes of the agents by host, once all have ended.

        Raises:
            LaunchError: they do not end in this time.
        """
        deadline = time.monotonic() + timeout_s
        try:
            return [
                self.agents[host].wait(max(0.1, deadline - time.monotonic()))
                for host in sorted(self.agents)
            ]
        except subprocess.TimeoutExpired:
            raise LaunchError(f"agents have not ended within {timeout_s:g} s{self.told}") from None

    def _mark(self, host: int) -> str:
        return f"{self._id}-{host}"
