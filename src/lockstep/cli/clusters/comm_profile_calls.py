"""The calls to time, of Lockstep's transport and of `torch.distributed`, and groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from lockstep.comm.shared_memory import are_on_one_host
from lockstep.comm.transport import Transport, offsets
from lockstep.launching.rank.environment import Environment
from lockstep.parallel.exchange import Leaves, copy_to_next
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import Range, split
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.reduction import OrderedReduction, Ways
from lockstep.planning.profile import Scope

Call = Callable[[], object]
Prepare = Callable[[Transport, int, torch.device], Call]
"""Collective function of a transport, a size in bytes and a device; it returns the call to time."""

_BUCKET_BYTES = 8 << 20
_NUM_SCALARS = 4
_NUM_HEADER = 8


def filled(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes in memory that is really there: untouched zeros may all be one shared page."""
    return torch.full([num_bytes], 1, dtype=torch.uint8, device=device)


def shares(num_bytes: int, size: int) -> list[int]:
    """A size in bytes cut into parts that are as equal as possible."""
    return [len(part) for part in split(num_bytes, size)]


def _ordered_sum(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    size = transport.size
    numel = -(-num_bytes // (4 * BLOCK)) * BLOCK
    reduction = OrderedReduction(
        transport,
        Leaves(
            [Segment(torch.float32, numel)],
            [[(0, torch.Size([numel]))]],
            _NUM_SCALARS,
            size,
            device,
        ),
        Mesh.of(size, size).microbatches,
        num_header=_NUM_HEADER,
        bucket_bytes=_BUCKET_BYTES,
        ways=Ways(shares_memory=True, is_one_host=are_on_one_host(transport)),
    )
    reduction.header.zero_()
    # Zeros stay what they are however often they are added up.
    scalars = torch.zeros(_NUM_SCALARS, dtype=torch.float64, device=device)
    reduction.fold.add([torch.zeros(numel, device=device)], scalars)
    return reduction.reduce


def _gather(transport: Transport, counts: list[int], device: torch.device) -> Call:
    out = filled(sum(counts), device)
    start = offsets(counts)[transport.rank]
    own = out[start : start + counts[transport.rank]]
    return lambda: transport.all_gather(own, out, counts)


def _all_gather(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    each = max(1, num_bytes // transport.size)
    return _gather(transport, [each] * transport.size, device)


def _all_gather_uneven(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    first, *others = shares(num_bytes, transport.size + 1)
    return _gather(transport, [first + others[0], *others[1:]], device)


def _all_to_all(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    counts = shares(num_bytes, transport.size)
    received, starts = [counts[transport.rank]] * transport.size, offsets(counts)
    send, recv = filled(num_bytes, device), filled(sum(received), device)
    return lambda: transport.all_to_all(send, counts, starts, recv, received)


def _to_next(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    own, other = filled(num_bytes, device), filled(num_bytes, device)
    slices = [Range(r * num_bytes, (r + 1) * num_bytes) for r in range(transport.size)]
    return lambda: copy_to_next(transport, own, other, slices)


def _broadcast(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    tensor = filled(num_bytes, device)
    return lambda: transport.broadcast(tensor, 0)


def _message(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    tensor = filled(num_bytes, device)
    # Launchers put neighbouring ranks on one host: among all ranks, only these two are far apart.
    last = transport.size - 1
    other = last - transport.rank

    def there_and_back() -> None:
        if transport.rank == 0:
            transport.send(tensor, other).wait()
            transport.receive(tensor, other)
        elif transport.rank == last:
            transport.receive(tensor, other)
            transport.send(tensor, other).wait()

    return there_and_back


def _gather_json(transport: Transport, num_bytes: int, device: torch.device) -> Call:
    text = "x" * max(1, num_bytes // transport.size - len('""'))
    return lambda: transport.gather_json(text)


ENGINE_CALLS: Mapping[str, Prepare] = MappingProxyType(
    {
        "ordered_sum": _ordered_sum,
        "all_gather": _all_gather,
        "all_gather_uneven": _all_gather_uneven,
        "all_to_all": _all_to_all,
        "to_next": _to_next,
        "broadcast": _broadcast,
        "message": _message,
        "gather_json": _gather_json,
        "barrier": lambda transport, *_: transport.barrier,
        "agree": lambda transport, *_: transport.agree,
    }
)
"""By the names of `OPERATIONS`."""


@dataclass(frozen=True)
class Group:
    """Groups of ranks that measure at the same time.

    Attributes:
        scope: what the profile calls them.
        parts: ranks of each group; each rank is in exactly one.
        idle: ranks that are in a group and take no part.
    """

    scope: Scope
    parts: tuple[tuple[int, ...], ...]
    idle: frozenset[int]

    @property
    def num_ranks(self) -> int:
        """The size of the largest group that takes part."""
        return max(len(part) for part in self.parts if not self.idle.issuperset(part))


def grouped(hosts: Sequence[str]) -> list[Group]:
    """The groups to measure.

    Args:
        hosts: name of each rank's host.
    """
    everyone = tuple(range(len(hosts)))
    by_host = [tuple(r for r in everyone if hosts[r] == host) for host in dict.fromkeys(hosts)]
    if len(by_host) == 1:
        return [Group("inside", (everyone,), frozenset())]
    groups = []
    alone = frozenset(part[0] for part in by_host if len(part) == 1)
    if len(alone) < len(by_host):
        groups.append(Group("inside", tuple(by_host), alone))
    first = tuple(part[0] for part in by_host)
    others = tuple(rank for rank in everyone if rank not in first)
    if not others:
        return [*groups, Group("between", (first,), frozenset())]
    between = Group("between", (first, others), frozenset(others))
    return [*groups, between, Group("all", (everyone,), frozenset())]


def joined(world: Transport, group: Group) -> Transport:
    """The transport of this rank's part of a group; a collective of all ranks."""
    return world if len(group.parts) == 1 else world.subgroup(group.parts)


def open_torch(transport: Transport, environment: Environment, timeout_s: float) -> str:
    """Make the default process group of all ranks, where there is none; the name of its backend.

    Args:
        transport: transport of all ranks.
        environment: place of this process among the ranks.
        timeout_s: seconds that a collective may wait for other ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    if transport.name == "mpi" and not dist.is_initialized():
        from lockstep.comm.backend import init_process_group

        init_process_group(timeout=timeout)
    elif not dist.is_initialized():
        # Lockstep's own supervisor: `torch.distributed` does not know the engine's group.
        assert environment.master_addr is not None
        assert environment.master_port is not None
        store = TCPStore(environment.master_addr, environment.master_port, timeout=timeout)
        dist.init_process_group(
            transport.name,
            store=PrefixStore("lockstep/comm-profile", store),
            rank=transport.rank,
            world_size=transport.size,
            timeout=timeout,
        )
    return str(dist.get_backend())


def joined_torch(group: Group, rank: int) -> Any:
    """The process group of this rank's part of a group; a collective of all ranks."""
    if len(group.parts) == 1:
        return dist.group.WORLD
    made = [dist.new_group(list(part)) for part in group.parts]
    return next(one for one, part in zip(made, group.parts, strict=True) if rank in part)


def _function(name: str, before: str) -> Callable[..., Any]:
    """A function of `torch.distributed`, which older versions call `before`."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _floats(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.full([max(1, num_bytes // 4)], 0.0, device=device).add_(0.0)


def _all_reduce(group: Any, num_bytes: int, device: torch.device) -> Call:
    return partial(dist.all_reduce, _floats(num_bytes, device), group=group)


def _torch_all_gather(group: Any, num_bytes: int, device: torch.device) -> Call:
    size = dist.get_world_size(group)
    own = _floats(num_bytes // size, device)
    out = own.new_zeros(own.numel() * size).add_(0.0)
    gather = _function("all_gather_single", "all_gather_into_tensor")
    return partial(gather, out, own, group=group)


def _reduce_scatter(group: Any, num_bytes: int, device: torch.device) -> Call:
    size = dist.get_world_size(group)
    own = _floats(num_bytes // size, device)
    parts = own.new_zeros(own.numel() * size).add_(0.0)
    scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
    return partial(scatter, own, parts, group=group)


def _torch_all_to_all(group: Any, num_bytes: int, device: torch.device) -> Call:
    size = dist.get_world_size(group)
    send = _floats(max(1, num_bytes // (4 * size)) * 4 * size, device)
    recv = torch.zeros_like(send).add_(0.0)
    return partial(dist.all_to_all_single, recv, send, group=group)


def _torch_broadcast(group: Any, num_bytes: int, device: torch.device) -> Call:
    root = dist.get_global_rank(group, 0)
    return partial(dist.broadcast, _floats(num_bytes, device), src=root, group=group)


def _send_recv(group: Any, num_bytes: int, device: torch.device) -> Call:
    tensor = _floats(num_bytes, device)
    rank = dist.get_rank(group)
    # As `lockstep/message`: the two ranks that are farthest apart.
    last = dist.get_world_size(group) - 1
    other = dist.get_global_rank(group, last - rank)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(tensor, dst=other, group=group)
            dist.recv(tensor, src=other, group=group)
        elif rank == last:
            dist.recv(tensor, src=other, group=group)
            dist.send(tensor, dst=other, group=group)

    return there_and_back


TORCH_CALLS: Mapping[str, Callable[[Any, int, torch.device], Call]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "all_gather": _torch_all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _torch_all_to_all,
        "broadcast": _torch_broadcast,
        "send_recv": _send_recv,
        "barrier": lambda group, *_: partial(dist.barrier, group=group),
    }
)
"""Functions of a process group, a size in bytes and a device that return the call to time, by the
names of `OPERATIONS`."""
