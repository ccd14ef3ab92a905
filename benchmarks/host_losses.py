"""What the loss of a process and of a host costs on several hosts, with agents and with torchft."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.leftovers import host_of
from lab.network import INTERFACE, Lab
from lockstep.cli.prove.chaos_hosts import Hosts
from lockstep.launching.job.commands import rank_environment
from page import Section, duration
from processes import HERE, Spread

HOSTS = 3
PATIENCES_S = (1.0, 5.0)
"""Seconds that the others wait for one that does not answer."""
LOSSES = ("process", "host")
TITLE = "A process or a host is lost"
_VICTIM = HOSTS - 1
_STEPS_BEFORE, _STEPS_AFTER = 20, 20
_PORT = 29500
_PATIENCE_S = 90.0


class LabHosts(Hosts):
    """Agents on the hosts of a lab."""

    def __init__(self, lab: Lab, folder: Path, patience_s: float) -> None:
        self._lab = lab
        run_dir = folder / "run"
        train = ["train", "digits", "steps=1000000", "log_every=1", "checkpoint.every=1000000"]
        super().__init__(
            folder, HOSTS, 1, patience_s, ["--rendezvous", f"h0:{_PORT}"],
            [*train, "--run-dir", str(run_dir)], run_dir, folder / "log", rank_environment(1),
        )  # fmt: skip

    def on(self, host: int, argv: Sequence[str]) -> list[str]:
        """See `Hosts.on`."""
        return self._lab.command(host, argv)


def agents(loss: str, patience_s: float) -> list[float]:
    """Times of the steps of a run of `lockstep agent` that loses a process, or a host's cable."""
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS) as lab, contextlib.ExitStack() as ends:
        hosts = LabHosts(lab, Path(folder), patience_s)
        ends.callback(hosts.kill_all)
        for host in range(HOSTS):
            hosts.start(host)
        _wait(lambda: hosts.step() > _STEPS_BEFORE, hosts.said)
        struck_at = time.time()
        _strike(lab, loss, hosts.ranks(_VICTIM))
        _wait(lambda: bool(hosts.rows("Recovered")), hosts.said)
        step = hosts.step()
        _wait(lambda: hosts.step() > step + _STEPS_AFTER, hosts.said)
        return [struck_at, *(row["time"] for row in hosts.rows("StepDone"))]


def torchft(loss: str, patience_s: float) -> list[float]:
    """The same of replicas of torchft, whose lighthouse is on the first host."""
    lighthouse = [
        shutil.which("torchft_lighthouse")
        or str(Path(sys.executable).with_name("torchft_lighthouse")),
        "--bind", f"0.0.0.0:{_PORT}", "--min_replicas", "1",
        "--join_timeout_ms", f"{1e3 * patience_s:.0f}",
        "--heartbeat_timeout_ms", f"{1e3 * patience_s:.0f}",
    ]  # fmt: skip
    with Lab(HOSTS) as lab, contextlib.ExitStack() as ends, tempfile.TemporaryDirectory() as folder:

        def start(host: int, argv: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
            with out.open("wb") as file:
                child = subprocess.Popen(
                    lab.command(host, argv), stdout=file, stderr=subprocess.DEVNULL,
                    env=rank_environment(1),
                )  # fmt: skip
            ends.callback(child.wait)
            ends.callback(child.kill)
            return child

        start(0, lighthouse, Path(folder, "lighthouse"))
        loops = []
        for host in range(HOSTS):
            argv = [sys.executable, str(HERE / "peers" / "torchft_loop.py"), "--replica", str(host)]
            argv += ["--replicas", str(HOSTS), "--steps", "1000000", "--host", lab.address(host)]
            argv += ["--lighthouse", f"http://{lab.address(0)}:{_PORT}"]
            argv += ["--patience", str(patience_s)]
            loops.append(start(host, argv, Path(folder, str(host))))

        def steps() -> list[dict[str, Any]]:
            lines = Path(folder, "0").read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]

        _wait(lambda: sum(row["of"] == HOSTS for row in steps()) > _STEPS_BEFORE, str)
        struck_at = time.time()
        _strike(lab, loss, [loops[_VICTIM].pid])
        has_gone_on = _waited(
            lambda: (
                sum(row["time"] > struck_at and row["of"] < HOSTS for row in steps()) > _STEPS_AFTER
            )
        )
        # Some of its replicas never go on: their pause is at least what was waited for.
        waited = [] if has_gone_on else [time.time()]
        return [struck_at, *(row["time"] for row in steps()), *waited]


_SYSTEMS: dict[str, Callable[[str, float], list[float]]] = {
    "lockstep agent": agents,
    "torchft": torchft,
}


def lost(rounds: int, measured: str) -> Section:
    """Both losses with both, in turn.

    Args:
        rounds: how often each.
        measured: when and how, in words.
    """
    section = Section(
        TITLE,
        f"{measured} {HOSTS} hosts (network namespaces) with a process each; it is not the first "
        "host that is struck. `process`: SIGKILL. `host`: its cable is pulled, so that it falls "
        "silent. `waits`: `--host-timeout` (default 5 s), and all of torchft's timeouts: "
        "`join_timeout_ms`, `heartbeat_timeout_ms`, `connect_timeout` and both `timeout`s (5 s to "
        "60 s), with eight heartbeats in it, as agents have; its `quorum_timeout` (60 s), after "
        "which a replica ends, is four times as long. "
        "`next step`: from the loss to the next step of the others; "
        f"{_PATIENCE_S:g} s is a run that had not gone on by then. `a step`: agents store a row "
        "of each.",
        ("lost", "of", "waits", "losses", "next step", "a step"),
    )  # fmt: skip
    found: dict[tuple[str, float, str], list[tuple[float, float]]] = {
        case: [] for case in itertools.product(LOSSES, PATIENCES_S, _SYSTEMS)
    }
    for _, case in itertools.product(range(rounds), found):
        loss, patience_s, name = case
        struck_at, *times = _SYSTEMS[name](loss, patience_s)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        # A step that was about to be committed may still be: the longest wait is what counts.
        pauses = [
            (later - earlier, later - struck_at)
            for earlier, later in itertools.pairwise(times)
            if later > struck_at
        ]
        found[case].append((max(pauses)[1], statistics.median(gaps)))
        print(*case, *found[case][-1], file=sys.stderr)
    for (loss, patience_s, name), rows in found.items():
        section.raw[f"{loss}, {patience_s:g} s, {name}"] = rows
        resumed, step = (Spread.of(list(values)) for values in zip(*rows, strict=True))
        cells = (f"{patience_s:g} s", str(len(rows)), duration(resumed), duration(step))
        section.rows.append((loss, name, *cells))
        if name != "torchft":
            worst = max(pause for pause, _ in rows)
            bound = 1.0 if loss == "process" else patience_s + 1
            what = f"{loss}, waits {patience_s:g} s: next step within {bound:g} s"
            section.at_most(what, f"{worst:.2f} s", worst <= bound)
    return section


def _strike(lab: Lab, loss: str, pids: Sequence[int]) -> None:
    if loss == "host":
        inside = ["ip", "netns", "exec", host_of(lab.name, _VICTIM), "ip", "link", "set"]
        subprocess.run([*inside, INTERFACE, "down"], check=True)
        return
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _wait(is_done: Callable[[], bool], said: Callable[[], str]) -> None:
    if not _waited(is_done):
        sys.exit(f"hosts: nothing goes on any more\n{said()}")


def _waited(is_done: Callable[[], bool]) -> bool:
    """Whether something is so after a while."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
