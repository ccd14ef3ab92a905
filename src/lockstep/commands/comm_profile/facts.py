"""What a profile's numbers depend on: machines, versions, and whether they can be believed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import lockstep
from lockstep.engine.step.memory import memory_limits
from lockstep.launchers.rank.environment import Environment
from lockstep.launchers.rank.threads import cores_of_host
from lockstep.planning.profile.profile import Host

_MEMORY_SHARE = 0.7
"""Part of the free memory that a measurement may take."""
_BUSY = 0.7
"""Processes beside the ranks for which there is no core, from which on a host counts as busy."""


@dataclass(frozen=True)
class Facts:
    """What a rank knows of its host.

    Attributes:
        host: its name.
        processor: what its processor calls itself.
        cores: number of cores that its ranks may use.
        load: mean number of its busy processes in the minute before.
        memory_bytes: memory that this rank may use.
    """

    host: str
    processor: str
    cores: int
    load: float
    memory_bytes: int


def facts_of(host: str, environment: Environment, device: torch.device) -> Facts:
    """What this rank knows of its host.

    Args:
        host: name of the host.
        environment: place of this process among the ranks.
        device: device that tensors are on.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = _free_bytes() // environment.local_world_size
    load = os.getloadavg()[0]
    cores = cores_of_host(environment)
    return Facts(host, processor(), cores, load, int(free * _MEMORY_SHARE))


def hosts_of(facts: Sequence[Facts]) -> tuple[Host, ...]:
    """The machines that ranks have told of, in the order of their first ranks."""
    hosts = []
    for name in dict.fromkeys(each.host for each in facts):
        ranks = tuple(rank for rank, each in enumerate(facts) if each.host == name)
        first = facts[ranks[0]]
        hosts.append(Host(name, first.processor, first.cores, ranks, first.load))
    return tuple(hosts)


def warnings_of(hosts: Sequence[Host]) -> Iterator[str]:
    """Reasons why times may say little."""
    for host in hosts:
        num_ranks = len(host.ranks)
        on = f"{num_ranks} ranks on {host.cores} cores"
        if num_ranks > host.cores:
            yield (
                f"{host.name}: {on}: they wait for one another's cores, and the times say little "
                f"of the network; start {host.cores} at most"
            )
        elif host.load + num_ranks > host.cores + _BUSY:
            yield (
                f"{host.name}: was busy before (load {host.load:.1f}, {on}): the times are too "
                "long; measure again when nothing else runs there"
            )


def versions(transport: str) -> dict[str, str]:
    """The versions of programs that times depend on.

    Args:
        transport: name of the engine's transport.
    """
    found = {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in ("numpy", "mpi4py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if transport == "mpi":
        from lockstep.comm.mpi.library import MPI

        found["mpi"] = MPI.Get_library_version().partition(",")[0].strip()
    return found


def processor() -> str:
    """What the processor calls itself."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _free_bytes() -> int:
    """Memory of this host that is free, within this process's limits."""
    free = min(available for _, available in memory_limits())
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) << 10)
    return max(free, 0)
