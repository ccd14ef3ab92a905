"""Measures operations at all sizes within a time budget, and records what the times depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import lockstep
from lockstep.cli.clusters.comm_profile_calls import ENGINE_CALLS, TORCH_CALLS, Group
from lockstep.cli.clusters.comm_profile_meter import LEAST, Meter, Timed, start_of
from lockstep.comm.transport import Transport
from lockstep.engine.digests import processor
from lockstep.engine.step.memory import device_memory, memory_limits
from lockstep.launching.rank.environment import Environment
from lockstep.launching.rank.process import cores_of_host
from lockstep.planning.operations import OPERATIONS, Operation, Point, fitted, size_text, summarised
from lockstep.planning.profile import Host, Measurement, Skipped

_MEMORY_SHARE = 0.7
"""Part of the free memory that a measurement may take."""
_BUSY = 0.7
"""Processes beside the ranks for which there is no core, from which on a host counts as busy."""


@dataclass(frozen=True)
class Facts:
    """The facts that a rank reports about its host.

    Attributes:
        host: its name.
        processor: model name of its processor.
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
    """The facts about the host of this rank.

    Args:
        host: name of the host.
        environment: place of this process among the ranks.
        device: device that tensors are on.
    """
    free, _ = device_memory(device)
    if not free:
        free = _free_bytes() // environment.local_world_size
    load = os.getloadavg()[0]
    cores = cores_of_host(environment)
    return Facts(host, processor(), cores, load, int(free * _MEMORY_SHARE))


def hosts_of(facts: Sequence[Facts]) -> tuple[Host, ...]:
    """The machines of the ranks, in the order of their first ranks."""
    hosts = []
    for name in dict.fromkeys(each.host for each in facts):
        ranks = tuple(rank for rank, each in enumerate(facts) if each.host == name)
        first = facts[ranks[0]]
        hosts.append(Host(name, first.processor, first.cores, ranks, first.load))
    return tuple(hosts)


def warnings_of(hosts: Sequence[Host]) -> Iterator[str]:
    """Reasons why times may be unreliable."""
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
    """The versions of programs that influence the times.

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


def _free_bytes() -> int:
    """Memory of this host that is free, within this process's limits."""
    free = min(available for _, available in memory_limits())
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) << 10)
    return max(free, 0)


_LARGE_SHARE = 8.0
"""A size may take this many times its share of the remaining time, if its fewest calls need it."""
_SMALL_SHARE = 0.01
"""Sizes that take less than this part of the total time are measured even if none is left."""
_LATENCY_BYTES = 64 << 10
"""Up to this size, time is not expected to grow with it."""
_MESSAGES = ("lockstep/message", "torch/send_recv")
"""Operations whose calls are a round trip, timed by the rank that begins it."""


@dataclass
class _Found:
    """The measurements of an operation so far."""

    operation: Operation
    points: list[Point] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def least_s(self, num_bytes: int) -> float:
        """The least seconds that a size will take, from the time of the one before."""
        if not self.points:
            return 0.0
        before = self.points[-1]
        growth = max(1.0, num_bytes / max(before.num_bytes, _LATENCY_BYTES))
        return (LEAST + 1) * before.min_s * growth

    def measurement(self, group: Group) -> Measurement:
        """The finished measurement, with a line through the medians."""
        sizes = [point.num_bytes for point in self.points]
        fit = None
        if len(sizes) > 1:
            fit = fitted(sizes, [point.median_s for point in self.points])
        one = self.operation
        return Measurement(
            one.layer, one.name, group.scope, group.num_ranks, tuple(self.points),
            tuple(self.skipped), fit,
        )  # fmt: skip


class Profiler:
    """Measures operations one after the other; all ranks do the same.

    Args:
        world: transport of all ranks.
        device: device that tensors are on.
        sizes: sizes to measure, in bytes, ascending.
        seconds: time to take for everything, about.
        memory_bytes: memory that each rank may use.
        num_groups: number of groups of ranks that both layers are measured in.

    Attributes:
        doing: what is being measured, for messages.
        unmeasured: for each operation of which no size could be measured, a line that says so.
    """

    def __init__(
        self,
        world: Transport,
        device: torch.device,
        sizes: Sequence[int],
        seconds: float,
        memory_bytes: int,
        num_groups: int,
    ) -> None:
        self.doing = "the start"
        self.unmeasured: list[str] = []
        self._world, self._device = world, device
        self._sizes, self._seconds, self._memory_bytes = sizes, seconds, memory_bytes
        self._meter = Meter(world, device)
        self._num_left = num_groups * sum(len(self._sizes_of(one)) for one in OPERATIONS.values())

    def measure(
        self, group: Group, transport: Transport, torch_group: object = None
    ) -> list[Measurement]:
        """Measure operations, those of which some size can be measured.

        All operations have a size measured before any has the next one: where time runs out, it
        does so for the largest sizes.

        Args:
            group: ranks that take part.
            transport: transport of this rank's part of the group.
            torch_group: the same for `torch.distributed`; None leaves its operations out.
        """
        start = None if self._world.rank in group.idle else start_of(transport, self._device)
        layers = ("lockstep",) if torch_group is None else ("lockstep", "torch")
        found = {one.key: _Found(one) for one in OPERATIONS.values() if one.layer in layers}
        for num_bytes in (0, *self._sizes):
            for one in found.values():
                if num_bytes in self._sizes_of(one.operation):
                    self._add(
                        one, group, num_bytes, self._timed(one, transport, torch_group, start)
                    )
        self.unmeasured += [
            f"{key}: nothing was measured, for want of {one.skipped[0].reason}"
            for key, one in found.items()
            if one.skipped and not one.points
        ]
        return [one.measurement(group) for one in found.values() if one.points]

    def _sizes_of(self, operation: Operation) -> list[int]:
        if not operation.has_size:
            return [0]
        return [n for n in self._sizes if operation.least_bytes <= n <= operation.most_bytes]

    def _timed(
        self,
        found: _Found,
        transport: Transport,
        torch_group: object,
        start: Callable[[], object] | None,
    ) -> Callable[[int], Timed]:
        """A function of a size that prepares this rank's part of a call of that size."""
        operation = found.operation

        def timed(num_bytes: int) -> Timed:
            if start is None:
                return Timed()
            if operation.layer == "torch":
                call = TORCH_CALLS[operation.name](torch_group, num_bytes, self._device)
            else:
                call = ENGINE_CALLS[operation.name](transport, num_bytes, self._device)
            if operation.key in _MESSAGES:
                return Timed(call, counts=transport.rank == 0)
            return Timed(call, start, counts=True)

        return timed

    def _add(
        self, found: _Found, group: Group, num_bytes: int, timed: Callable[[int], Timed]
    ) -> None:
        """Measure a size of an operation, or note why not."""
        operation = found.operation
        share_s = max(self._seconds - self._meter.elapsed_s, 0.0) / self._num_left
        most_s = max(_LARGE_SHARE * share_s, _SMALL_SHARE * self._seconds)
        self._num_left -= 1
        if operation.copies * num_bytes > self._memory_bytes:
            found.skipped.append(Skipped(num_bytes, "memory"))
        elif found.skipped or found.least_s(num_bytes) > most_s:
            found.skipped.append(Skipped(num_bytes, "time"))
        else:
            self.doing = f"{operation.key} of {size_text(num_bytes)}"
            seconds = self._meter.times(timed(num_bytes), share_s)
            if operation.key in _MESSAGES:
                seconds = [each / 2 for each in seconds]
            found.points.append(summarised(operation, group.num_ranks, num_bytes, seconds))
