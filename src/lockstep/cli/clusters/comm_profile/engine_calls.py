"""Calls of Lockstep's transport, with the arguments that the engine gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from lockstep.comm.shared_memory import are_on_one_host
from lockstep.comm.transport import Transport, offsets
from lockstep.parallel.exchange import copy_to_next
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import Range, split
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.reduction import OrderedReduction

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
        [Segment(torch.float32, numel)],
        [[(0, torch.Size([numel]))]],
        num_scalars=_NUM_SCALARS,
        num_header=_NUM_HEADER,
        num_microbatches=size,
        ranges=Mesh.of(size, size).microbatches,
        device=device,
        bucket_bytes=_BUCKET_BYTES,
        shares_memory=True,
        is_one_host=are_on_one_host(transport),
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
