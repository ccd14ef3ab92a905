"""`python -m tests.campaigns.hosts`: random faults on hosts of `lockstep agent`, as root.

The hosts are network namespaces. Ranks, agents, coordinators, stores, servers of etcd and whole
hosts are killed and come back, agents and hosts are stopped, cables are pulled or carry one way
only, a third of the packets is lost, disks are full and clocks jump by an hour, one after the other
and at the same time. Each
run ends with the SHA-256 of a run on one process, with each step committed once, no process left
behind, and what all ranks have written down shows that never two sides went on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab
from benchmarks.lab.tools import has_netem

from lockstep.cli.prove.chaos_host_faults import Faults, Kind, Struck, Undo
from lockstep.errors import LockstepError
from lockstep.launching.host.processes import send
from tests.campaigns.commits import NOTED, commits, contradictions, missing
from tests.conftest import result
from tests.lab.agents import Agents, Etcd, sha_alone

_FAULTS_A_RUN = 17
_STEPS = 900
"""More than a run makes while it is struck; the rest is done at full speed."""
_TIMEOUT_S = 2.0
_TIMEOUT_WITH_ETCD_S = 3.0
_WAIT_S = 30.0
_HOUR_S = 3600
_CLOCK = Path(__file__).parents[1] / "lab" / "clock.c"
COMPILER = shutil.which("cc")
_DROP = (
    "add table ip lab; add chain ip lab {hook} {{ type filter hook {hook} priority 0; }}; "
    "add rule ip lab {hook} meta {name} eth0 {share} drop"
)
"""Drops packets that come or go: two hosts may then hear each other in one direction alone."""


def compile_clock(folder: Path) -> Path:
    """The library that gives a process another wall clock (`tests/lab/clock.c`)."""
    assert COMPILER is not None
    library = folder / "clock.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, _CLOCK], check=True)
    return library


class Machines(Agents):
    """Hosts with clocks and small disks of their own; they share that of the run directory."""

    def __init__(self, lab: Lab, folder: Path, *options: str, **more: Any) -> None:
        super().__init__(lab, folder, *options, task=NOTED, run_dir="share/run", **more)
        self._sessions = 0
        (folder / "commits").mkdir()
        for name in ("share", *(f"disk{host}" for host in range(lab.num_hosts))):
            (folder / name).mkdir()
            argv = ["mount", "-t", "tmpfs", "-o", "size=32m", "lab", folder / name]
            subprocess.run(argv, check=True)
        for host in range(lab.num_hosts):
            self.set_clock(host, 0)
        if COMPILER:
            self._library = compile_clock(folder)

    def set_clock(self, host: int, seconds: int) -> None:
        """Have the clock of a host go wrong by so much."""
        with (self.folder / f"clock{host}").open("r+b" if self.agents else "wb") as file:
            file.write(struct.pack("q", seconds))

    def fill(self, name: str) -> Undo:
        """Leave no room on a disk; what makes it again."""
        balloon = self.folder / name / "balloon"
        with contextlib.suppress(OSError), balloon.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return lambda: balloon.unlink(missing_ok=True)

    def environment(self, host: int) -> dict[str, str]:
        own = {"TMPDIR": str(self.folder / f"disk{host}"), "SESSION": str(self._sessions)}
        if COMPILER:
            own |= {"LD_PRELOAD": str(self._library), "CLOCK": str(self.folder / f"clock{host}")}
        return super().environment(host) | own

    def resume(self) -> None:
        self._sessions += 1
        super().resume()

    def close(self) -> None:
        self.kill_all()
        for name in ("share", *(f"disk{host}" for host in range(self.num_hosts))):
            subprocess.run(["umount", "-l", self.folder / name], check=True)


class LabFaults(Faults):
    """The faults that need no root, and those that do."""

    def __init__(self, run: Machines, source: random.Random, etcd: Etcd | None) -> None:
        super().__init__(run, source)
        self._run, self._etcd = run, etcd
        self.kinds |= {
            "cable": Kind(4, self._pull, cuts=True),
            "stop": Kind(2, self._stop_agent, cuts=True),
            "disk": Kind(1, partial(self._fill, "disk{}"), loses=False),
            "share": Kind(1, partial(self._fill, "share"), loses=False),
        }
        if has_netem() or shutil.which("nft"):
            self.kinds["loss"] = Kind(2, self._lose, cuts=True)
        if shutil.which("nft"):
            self.kinds["deaf"] = Kind(2, partial(self._drop, "input", ""), cuts=True)
            self.kinds["mute"] = Kind(2, partial(self._drop, "output", ""), cuts=True)
        if COMPILER:
            self.kinds["clock"] = Kind(2, self._set_clock, lasts=False, loses=False)
        if etcd is not None:
            self.kinds["etcd"] = Kind(3, self._kill_etcd)

    def _pull(self, host: int) -> Undo:
        self._run.cable(host, "down")
        return lambda: self._run.cable(host, "up")

    def _lose(self, host: int) -> Undo:
        if has_netem():
            change = ["tc", "qdisc", "replace", "dev", "eth0", "root"]
            self._run.inside(host, *change, "netem", "loss", "30%")
            return lambda: self._run.inside(host, "tc", "qdisc", "del", "dev", "eth0", "root")
        return self._drop("input", "numgen random mod 100 < 30", host)

    def _drop(self, hook: str, share: str, host: int) -> Undo:
        name = "iifname" if hook == "input" else "oifname"
        self._run.inside(host, "nft", _DROP.format(hook=hook, name=name, share=share))
        return lambda: self._run.inside(host, "nft", "delete table ip lab")

    def _stop_agent(self, host: int) -> Undo:
        """Stop an agent, and the coordinator if it has that; its ranks and its store go on."""
        pid = self._run.agents[host].pid
        send([pid], signal.SIGSTOP)
        return lambda: send([pid], signal.SIGCONT)

    def _fill(self, name: str, host: int) -> Undo:
        return self._run.fill(name.format(host))

    def _set_clock(self, host: int) -> None:
        self._run.set_clock(host, self.source.choice([-_HOUR_S, _HOUR_S]))

    def _kill_host(self, host: int) -> Undo:
        again = super()._kill_host(host)
        return again if self._etcd is None else self._with_etcd(host, again)

    def _kill_etcd(self, host: int) -> Undo:
        return self._with_etcd(host, lambda: None)

    def _with_etcd(self, host: int, again: Undo) -> Undo:
        etcd = self._etcd
        assert etcd is not None
        etcd.kill(host)

        def start() -> None:
            etcd.start(host)
            again()

        return start


def one_run(
    root: Path, sha: str, has_etcd: bool, num_faults: int, source: random.Random, num_hosts: int
) -> Iterator[Struck | str]:
    """Strike one run: each fault, and at the end what has gone wrong."""
    with Lab(num_hosts) as lab, contextlib.ExitStack() as stack:
        etcd = stack.enter_context(Etcd(lab, root)) if has_etcd else None
        more = {} if etcd is None else {"rendezvous": etcd.rendezvous}
        timeout_s = _TIMEOUT_S if etcd is None else _TIMEOUT_WITH_ETCD_S
        options = ("--replace", str(10 * num_faults), "--wait", f"{_WAIT_S:g}")
        train = (f"steps={_STEPS}", "checkpoint.every=50", "--resume")
        run = Machines(
            lab, root / "hosts", *options, train=train, timeout_s=timeout_s, **more
        )  # fmt: skip
        stack.callback(run.close)
        faults = LabFaults(run, source, etcd)
        for host in range(num_hosts):
            run.start(host)
        yield from strike(run, faults, num_faults, sha, _STEPS)


def strike(
    run: Any, faults: Faults, num_faults: int, sha: str, num_steps: int
) -> Iterator[Struck | str]:
    """Strike hosts that train, to the end of the run: each fault, and what has gone wrong."""
    try:
        yield from faults.strike_all(num_faults)
        faults.end()
        codes = run.ended(300)
        if any(codes):
            yield f"codes {codes}"
        run.check_gone()
    except LockstepError as error:
        yield str(error)
        shutil.copytree(run.run_dir, run.folder.parent / "run")
        return
    finally:
        faults.undo_all()
    digest = result(run.run_dir).get("params_sha256")
    if digest != sha:
        yield f"{digest} instead of {sha}"
    yield from missing(run.all_rows(), num_steps)
    yield from contradictions(commits(run.folder / "commits"))


def summary(found: dict[str, list[Struck]]) -> str:
    """A table: what each kind of fault has cost."""
    lines = [f"{'fault':12} {'number':>6} {'runs ended':>10} {'pause':>8} {'longest':>8}"]
    for kind, all_struck in sorted(found.items()):
        pauses = sorted(struck.pause_s for struck in all_struck)
        ended = sum(struck.has_ended for struck in all_struck)
        median = pauses[len(pauses) // 2]
        lines.append(f"{kind:12} {len(pauses):6} {ended:10} {median:6.1f} s {pauses[-1]:6.1f} s")
    return "\n".join(lines)


def report(
    seed: int, num_faults: int, steps: int, runs: Callable[[Path, str, int], Iterator[Struck | str]]
) -> int:
    """Strike runs until there were enough faults, and print what has become of them.

    Args:
        seed: of the campaign.
        num_faults: number of faults in all.
        steps: number of steps of each run.
        runs: function that strikes one, in a folder, with its SHA-256 and number of faults.

    Returns:
        The exit code: 1 if anything went wrong.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which removes hosts and disks
    found: dict[str, list[Struck]] = defaultdict(list)
    wrong: list[str] = []
    done = number = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-alone-") as alone:
        sha = sha_alone(Path(alone), f"steps={steps}")
    while done < num_faults and not wrong:
        root = Path(tempfile.mkdtemp(prefix="lockstep-hosts-"))
        print(f"seed {seed}, run {number}: {root}", flush=True)
        for struck in runs(root, sha, min(_FAULTS_A_RUN, num_faults - done)):
            if isinstance(struck, str):
                wrong.append(struck)
                print(f"WRONG: {struck}", flush=True)
                continue
            done += 1
            found[struck.kind].append(struck)
            print(
                f"{time.monotonic() - began:5.0f} s: {done:4} step {struck.step:5} {struck.kind:12}"
                f" h{struck.host} "
                f"{struck.lasted_s:5.1f} s, pause {struck.pause_s:5.1f} s"
                f"{', started again' * struck.has_ended}",
                flush=True,
            )
        number += 1
        if not wrong:
            shutil.rmtree(root)
    print(summary(found))
    print(
        f"seed {seed}: {done} faults in {number} runs, {len(wrong)} things wrong; each "
        "run with one SHA-256, each step once, at most one side of a partition ever committing"
        if not wrong
        else f"seed {seed}: {len(wrong)} things wrong after {done} faults; see {root}"
    )
    return 1 if wrong else 0


def main() -> int:
    """Strike runs until there were enough faults; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="tests.campaigns.hosts", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--faults", type=int, default=30)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    kinds = itertools.cycle([False, shutil.which("etcd") is not None])

    def run(root: Path, sha: str, most: int) -> Iterator[Struck | str]:
        has_etcd = next(kinds)
        print("with etcd" if has_etcd else "without etcd", flush=True)
        return one_run(root, sha, has_etcd, most, source, arguments.hosts)

    return report(arguments.seed, arguments.faults, _STEPS, run)


if __name__ == "__main__":
    sys.exit(main())
