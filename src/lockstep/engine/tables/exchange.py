"""Messages about rows: each rank says or sends something else to each of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets


def tell_counts(transport: Transport, counts: Tensor, numbers: Sequence[int]) -> list[Tensor]:
    """Send each rank as many numbers as this rank has to tell, and receive theirs; a collective.

    Args:
        transport: the group of ranks.
        counts: for each rank, what it is told: int64 [size, numbers of this rank].
        numbers: how many numbers each rank tells each other one.

    Returns:
        What each rank has told this one: int64 [its number].
    """
    own = counts.contiguous().view(-1)
    each = [numbers[transport.rank]] * transport.size
    received = own.new_empty(sum(numbers))
    transport.all_to_all(own, each, offsets(each), received, list(numbers))
    return list(torch.split(received, list(numbers)))


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
    width = sent[0].numel() if len(sent) else int(torch.Size(sent.shape[1:]).numel())
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
