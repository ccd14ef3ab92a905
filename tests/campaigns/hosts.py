"""`python -m tests.campaigns.hosts`: random faults on hosts of `lockstep agent`, as root.

The hosts are network namespaces. Ranks, agents and whole hosts are killed and come back, agents are
stopped for a while, and cables are pulled and put back, one after the other and at the same time.
The run ends with the SHA-256 of a run on one process, with each step committed once and no process
left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab

from tests.conftest import result
from tests.lab.agents import TIMEOUT_S, Agents, sha_alone

_MOST_DOWN = 2.5 * TIMEOUT_S


class Faults:
    """Draws faults and makes them; the coordinator's host keeps its agent and its cable."""

    def __init__(self, run: Any, source: random.Random) -> None:
        self._run, self._source = run, source
        self._again: list[tuple[float, int, Callable[[], None]]] = []

    def strike(self) -> str:
        """Make a fault, on a host that has none at the moment; its name."""
        busy = {host for _, host, _ in self._again}
        others = [host for host in range(1, self._run.lab.num_hosts) if host not in busy]
        kind = self._source.choice(["rank", "rank", "host", "agent", "cable", "pause"])
        if kind == "rank" or not others:
            # Somebody has to stay who has the state.
            host = self._source.choice([*others, *([] if busy else [0])] or [0])
            self._run.kill(host, only_ranks=True)
            return f"rank of h{host}"
        host = self._source.choice(others)
        down_s = self._source.uniform(0.1, _MOST_DOWN)
        if kind == "host":
            self._run.kill(host)
            self._later(down_s, host, lambda: self._run.start(host))
        elif kind == "agent":
            self._run.processes[host].kill()
            self._run.processes[host].wait()
            self._later(down_s, host, lambda: self._run.start(host))
        elif kind == "cable":
            self._run.cable(host, "down")
            self._later(down_s, host, lambda: self._run.cable(host, "up"))
        else:
            self._run.processes[host].send_signal(signal.SIGSTOP)
            self._later(down_s, host, lambda: self._run.processes[host].send_signal(signal.SIGCONT))
        return f"{kind} h{host} for {down_s:.1f} s"

    def are_mended(self) -> bool:
        """Whether all have joined again that could."""
        self.mend()
        busy = len({host for _, host, _ in self._again})
        sizes = self._run.sizes() or [self._run.lab.num_hosts]
        return bool(sizes[-1] >= self._run.lab.num_hosts - busy)

    def mend(self, all_of_them: bool = False) -> None:
        """Undo what is due."""
        for entry in sorted(self._again, key=lambda entry: entry[0]):
            at, _, undo = entry
            if all_of_them:
                time.sleep(max(0.0, at - time.monotonic()))
            if at <= time.monotonic():
                self._again.remove(entry)
                with contextlib.suppress(ProcessLookupError):
                    undo()

    def _later(self, seconds: float, host: int, undo: Callable[[], None]) -> None:
        self._again.append((time.monotonic() + seconds, host, undo))


def end_all(run: Any) -> list[int]:
    """End what is left of a run's processes; which there were."""
    left = [pid for host in range(run.lab.num_hosts) for pid in run.on_host(host)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def main() -> int:
    """Strike one run; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="tests.campaigns.hosts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--faults", type=int, default=30)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    steps = f"steps={arguments.faults * 200}"
    root = Path(tempfile.mkdtemp(prefix="lockstep-hosts-"))
    print(f"seed {arguments.seed}; {root}", flush=True)
    sha = sha_alone(root, steps)
    with Lab(arguments.hosts) as lab, contextlib.ExitStack() as stack:
        options = ("--replace", str(10 * arguments.faults))
        run = Agents(lab, root / "on hosts", *options, train=(steps, "checkpoint.every=50"))
        faults = Faults(run, source)
        stack.callback(end_all, run)
        for host in range(arguments.hosts):
            run.start(host)
        run.wait_for(lambda: run.step() >= 3, 60)
        for number in range(arguments.faults):
            run.wait_for(faults.are_mended, 60)
            print(f"{number:3} step {run.step():5}: {faults.strike()}", flush=True)
            until = time.monotonic() + source.uniform(0.2, 3.0)
            while time.monotonic() < until:
                faults.mend()
                time.sleep(0.02)
            if run.processes[0].poll() is not None:
                break
        faults.mend(all_of_them=True)
        codes = run.codes(600)
        left = end_all(run)
    done = [row["step"] for row in run.rows("StepDone")]
    same = sha == result(run.folder / "run").get("params_sha256")
    once = done == sorted(set(done))
    wrong = codes != [0] * arguments.hosts or left or not same or not once
    print(
        f"seed {arguments.seed}: codes {codes}, {len(run.rows('Recovered'))} recoveries, "
        f"{'the same' if same else 'another'} SHA-256, each step {'once' if once else 'not once'}, "
        f"{len(left)} processes left; {root}"
    )
    if wrong:
        print(run.said(), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
