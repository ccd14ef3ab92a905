"""Messages about rows: each rank sends something else to each of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets

_FAILED = -1
"""In the place of lengths."""


class SomeRankFailed(Exception):
    """A rank has failed before a message, and has told the others in it; raised on all of them."""


def deliver(
    transport: Transport,
    parcels: Sequence[Sequence[Tensor]],
    numbers: Sequence[int],
    has_failed: bool = False,
) -> list[list[Tensor]]:
    """Send each rank some lists of numbers of any lengths, and receive theirs; a collective.

    Args:
        transport: the group of ranks.
        parcels: for each rank, what it gets: int64 [any] each, at least one on the right device.
        numbers: how many lists each rank sends to each other one.
        has_failed: whether this rank has nothing to say, but that it has failed.

    Returns:
        For each rank, what it has sent to this one.

    Raises:
        SomeRankFailed: on all ranks, if one of them has.
    """
    sent = [parcel for of_rank in parcels for parcel in of_rank]
    device = sent[0].device if sent else None
    counted = [_FAILED if has_failed else len(parcel) for parcel in sent]
    lengths = torch.tensor(counted, dtype=torch.int64, device=device)
    each = [numbers[transport.rank]] * transport.size
    told = lengths.new_empty(sum(numbers))
    transport.all_to_all(lengths, each, offsets(each), told, list(numbers))
    theirs = [part.tolist() for part in torch.split(told, list(numbers))]
    if any(_FAILED in of_rank for of_rank in theirs):
        raise SomeRankFailed
    counts = [sum(len(parcel) for parcel in of_rank) for of_rank in parcels]
    content = torch.cat(sent) if sent else told.new_empty(0)
    arrived = swap(transport, content, counts, [sum(of_rank) for of_rank in theirs])
    by_rank = torch.split(arrived, [sum(of_rank) for of_rank in theirs])
    return [list(torch.split(part, own)) for part, own in zip(by_rank, theirs, strict=True)]


def swap(
    transport: Transport, sent: Tensor, counts: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Send each rank some entries of a tensor, and receive theirs; a collective.

    Args:
        transport: the group of ranks.
        sent: entries for rank 0, those for rank 1 and so on: [n, ...].
        counts: number of entries for each rank.
        received: number of entries from each rank.

    Returns:
        Entries from rank 0, from rank 1 and so on.
    """
    width = torch.Size(sent.shape[1:]).numel()
    out = sent.new_empty((sum(received), *sent.shape[1:]))
    sizes = [count * width for count in counts]
    transport.all_to_all(
        sent.contiguous().view(-1),
        sizes,
        offsets(sizes),
        out.view(-1),
        [count * width for count in received],
    )
    return out


def swap_rows(
    transport: Transport, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]]
) -> list[list[Tensor]]:
    """Send each rank some tensors of rows, and receive theirs; a collective.

    Args:
        transport: the group of ranks.
        sent: for each rank, what it gets: float32 [n, dim] each.
        shapes: for each rank, the shapes of what it sends.

    Returns:
        For each rank, what it has sent to this one.
    """
    flat = [tensor.reshape(-1) for of_rank in sent for tensor in of_rank]
    counts = [sum(tensor.numel() for tensor in of_rank) for of_rank in sent]
    sizes = [[shape.numel() for shape in of_rank] for of_rank in shapes]
    content = torch.cat(flat) if flat else torch.empty(0)
    arrived = swap(transport, content, counts, [sum(of_rank) for of_rank in sizes])
    by_rank = torch.split(arrived, [sum(of_rank) for of_rank in sizes])
    return [
        [part.view(shape) for part, shape in zip(torch.split(own, size), shape_of, strict=True)]
        for own, size, shape_of in zip(by_rank, sizes, shapes, strict=True)
    ]
