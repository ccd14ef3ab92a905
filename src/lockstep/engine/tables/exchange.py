"""Exchange of rows between ranks: to look them up, to sum gradients, and to redistribute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets
from lockstep.engine.tables.table import DistributedTable, Part, RowSum, widths
from lockstep.nn.sparse_embedding import Fetched
from lockstep.parallel.layout import ROWS, Node, RowLayout

_FAILED = -1
"""Sent instead of lengths by a rank that has failed."""

_GROUPS_AT_ONCE = 4096
"""Groups of rows that are sent at a time, which bounds the memory."""


class SomeRankFailed(Exception):
    """A rank had failed before a message, and said so in it; raised on all ranks."""


def fetch(
    transport: Transport,
    tables: Sequence[DistributedTable],
    wanted: Sequence[Sequence[Tensor]],
    trains: bool,
    has_failed: bool = False,
) -> list[list[Fetched]]:
    """Fetch rows from their owners; a collective of three messages.

    Args:
        transport: the group of ranks.
        tables: the tables.
        wanted: for each table, rows that are looked up together: int64 [n] each, ascending.
        trains: whether they take gradients.
        has_failed: whether this rank has failed before it knew what it wants.

    Returns:
        For each table, the rows of each lookup.

    Raises:
        SomeRankFailed: on all ranks, if one of them has.
    """
    ranks = range(transport.size)
    requests = [table.request(of_table) for table, of_table in zip(tables, wanted, strict=True)]
    parcels = [[each.of_owners[owner] for each in requests] for owner in ranks]
    theirs = deliver(transport, parcels, [len(tables)] * transport.size, has_failed)
    answers = [
        [table.answer(ids) for table, ids in zip(tables, of_rank, strict=True)]
        for of_rank in theirs
    ]
    dims = [table.module.dim for table in tables]
    shapes = [
        [torch.Size((len(ids), dim)) for dim, ids in zip(dims, of_rank, strict=True)]
        for of_rank in parcels
    ]
    rows = swap_tensors(transport, answers, shapes)
    return [
        table.take(each, [rows[owner][number] for owner in ranks], of_table, trains)
        for number, (table, each, of_table) in enumerate(zip(tables, requests, wanted, strict=True))
    ]


def reduce(
    transport: Transport, tables: Sequence[DistributedTable], nodes: Sequence[Sequence[Node]]
) -> None:
    """Sum the gradients of each row on the ranks that step it; a collective of three messages.

    Args:
        transport: the group of ranks.
        tables: tables that have taken the gradients of all microbatches.
        nodes: nodes of the canonical tree that each rank has sums of.
    """
    ranks = range(transport.size)
    own = [table.gradients(transport.rank) for table in tables]
    parcels = [[each for of_table in own for each in of_table[to]] for to in ranks]
    numbers = [len(tables) * len(of_rank) for of_rank in nodes]
    ids = deliver(transport, [[each.ids for each in to] for to in parcels], numbers)
    dims = [[t.module.dim for t in tables for _ in of_rank] for of_rank in nodes]
    shapes = [
        [torch.Size((len(some), dim)) for some, dim in zip(of_rank, of_dims, strict=True)]
        for of_rank, of_dims in zip(ids, dims, strict=True)
    ]
    rows = swap_tensors(transport, [[each.rows for each in to] for to in parcels], shapes)
    every = [node for of_rank in nodes for node in of_rank]
    for number, table in enumerate(tables):
        sums: list[RowSum] = []
        for rank in ranks:
            first = number * len(nodes[rank])
            part = slice(first, first + len(nodes[rank]))
            sums += map(RowSum, ids[rank][part], rows[rank][part])
        table.sum_up(sums, every)


class OwnedParts(NamedTuple):
    """The parts of a table on a rank.

    Attributes:
        size: number of ranks that the table was distributed over; 0 without parts.
        owners: owners of the parts.
    """

    size: int
    owners: list[int]


def redistribute(
    transport: Transport,
    table: DistributedTable,
    parts_of_ranks: Sequence[OwnedParts],
    layout: RowLayout,
    shifts: Sequence[int],
    device: torch.device,
) -> list[Part] | None:
    """The new parts of this rank; a collective that changes no present part.

    Args:
        transport: the new group of ranks.
        table: table with the present parts of this rank.
        parts_of_ranks: the present parts of each rank of the new group.
        layout: the new distribution of rows.
        shifts: for each new part of a rank, how many ranks before it the owner is.
        device: device of the parts.

    Returns:
        None, on all ranks, if no rank has some of the rows.
    """
    rank, size = transport.rank, transport.size
    parts = [Part.empty(table.module, layout, (rank - shift) % size, device) for shift in shifts]
    # All parts were distributed over one group, since ranks change theirs together.
    old_size = next((theirs.size for theirs in parts_of_ranks if theirs.size), 0)
    # The lowest rank that has each part.
    sources = {o: r for r, own in reversed(list(enumerate(parts_of_ranks))) for o in own.owners}
    if not old_size or any(owner not in sources for owner in range(old_size)):
        return None
    source = torch.tensor([sources[owner] for owner in range(old_size)])
    for first in range(0, layout.num_groups, _GROUPS_AT_ONCE):
        groups = torch.arange(first, min(first + _GROUPS_AT_ONCE, layout.num_groups))
        sender = source[groups % old_size]
        for part, shift in zip(parts, shifts, strict=True):
            receiver = (groups % size + shift) % size
            sent = [groups[(sender == rank) & (receiver == to)] for to in range(size)]
            received = [groups[(sender == by) & (receiver == rank)] for by in range(size)]
            for name, width in widths(table.module).items():
                rows = _copied(table.parts, old_size, torch.cat(sent), name, width, device)
                new = swap(transport, rows, [*map(len, sent)], [*map(len, received)])
                part.groups(name)[(torch.cat(received) // size).to(device)] = new
    return parts


def _copied(
    parts: Sequence[Part], size: int, groups: Tensor, name: str, width: int, device: torch.device
) -> Tensor:
    """Copies of a field of some groups of rows in parts of this rank: [n, ROWS, width]."""
    copies = torch.empty(len(groups), ROWS, width, device=device)
    for part in parts:
        mine = groups % size == part.owner
        copies[mine.to(device)] = part.groups(name)[(groups[mine] // size).to(device)]
    return copies


def deliver(
    transport: Transport,
    parcels: Sequence[Sequence[Tensor]],
    numbers: Sequence[int],
    has_failed: bool = False,
) -> list[list[Tensor]]:
    """Send each rank some lists of numbers of any lengths, and receive theirs; a collective.

    Args:
        transport: the group of ranks.
        parcels: for each rank, the lists that it receives: int64 [any] each.
        numbers: number of lists that each rank sends to each other one.
        has_failed: whether this rank sends only that it has failed.

    Returns:
        For each rank, the lists that it has sent to this one.

    Raises:
        SomeRankFailed: on all ranks, if one of them has.
    """
    sent = [parcel for of_rank in parcels for parcel in of_rank]
    device = sent[0].device if sent else None
    counted = [_FAILED if has_failed else len(parcel) for parcel in sent]
    lengths = torch.tensor(counted, dtype=torch.int64, device=device)
    each = [numbers[transport.rank]] * transport.size
    received = lengths.new_empty(sum(numbers))
    transport.all_to_all(lengths, each, offsets(each), received, list(numbers))
    theirs = [part.tolist() for part in torch.split(received, list(numbers))]
    if any(_FAILED in of_rank for of_rank in theirs):
        raise SomeRankFailed
    shapes = [[torch.Size((length,)) for length in of_rank] for of_rank in theirs]
    return swap_tensors(transport, parcels, shapes, torch.int64)


def swap_tensors(
    transport: Transport,
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    dtype: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """Send each rank some tensors, and receive theirs; a collective.

    Args:
        transport: the group of ranks.
        sent: for each rank, the tensors that it receives.
        shapes: for each rank, the shapes of the tensors that it sends.
        dtype: dtype of all of them.

    Returns:
        For each rank, the tensors that it has sent to this one.
    """
    flat = [tensor.reshape(-1) for of_rank in sent for tensor in of_rank]
    counts = [sum(tensor.numel() for tensor in of_rank) for of_rank in sent]
    sizes = [[shape.numel() for shape in of_rank] for of_rank in shapes]
    content = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
    arrived = swap(transport, content, counts, [sum(of_rank) for of_rank in sizes])
    by_rank = torch.split(arrived, [sum(of_rank) for of_rank in sizes])
    return [
        [part.view(shape) for part, shape in zip(torch.split(own, size), shape_of, strict=True)]
        for own, size, shape_of in zip(by_rank, sizes, shapes, strict=True)
    ]


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
