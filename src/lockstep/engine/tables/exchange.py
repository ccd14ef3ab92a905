"""Rows on their way between ranks: looked up, summed, and moved to new owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets
from lockstep.engine.tables.table import DistributedTable, Part, widths
from lockstep.nn.sparse_embedding import Fetched
from lockstep.parallel.fold import RowSum
from lockstep.parallel.layout import ROWS, Node, RowLayout

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


_GROUPS_AT_ONCE = 4096
"""Groups of rows of the table that are on their way at a time: what it takes in memory."""


class Described(NamedTuple):
    """What a rank holds of a table.

    Attributes:
        size: number of ranks that the table was distributed over; 0 for nothing.
        owners: whose rows they are.
    """

    size: int
    owners: list[int]


def deal(
    transport: Transport,
    dealt: DistributedTable,
    there: Sequence[Described],
    layout: RowLayout,
    shifts: Sequence[int],
    device: torch.device,
) -> list[Part] | None:
    """The parts that this rank is to hold; a collective, in which nothing that is held changes.

    Args:
        transport: the new group of ranks.
        dealt: table, with the parts that this rank holds.
        there: what each rank of the new group holds.
        layout: how rows are to be distributed.
        shifts: how many ranks before a rank those are whose rows it is to hold.
        device: device that they are on.

    Returns:
        None, on all ranks, if some rows are held by nobody.
    """
    rank, size = transport.rank, transport.size
    parts = [Part.empty(dealt.table, layout, (rank - shift) % size, device) for shift in shifts]
    # All that is held was distributed over one group: ranks change what they hold together.
    former = next((held.size for held in there if held.size), 0)
    holders = {o: r for r, held in reversed(list(enumerate(there))) for o in held.owners}
    if not former or any(owner not in holders for owner in range(former)):
        return None
    source = torch.tensor([holders[owner] for owner in range(former)])
    names = widths(dealt.table)
    for first in range(0, layout.num_groups, _GROUPS_AT_ONCE):
        groups = torch.arange(first, min(first + _GROUPS_AT_ONCE, layout.num_groups))
        has = source[groups % former]
        for part, shift in zip(parts, shifts, strict=True):
            wants = (groups % size + shift) % size
            sent = [groups[(has == rank) & (wants == to)] for to in range(size)]
            received = [groups[(has == by) & (wants == rank)] for by in range(size)]
            for name in names:
                rows = _chosen(dealt.parts, former, torch.cat(sent), name, names[name], device)
                came = swap(transport, rows, [*map(len, sent)], [*map(len, received)])
                places = torch.cat(received) // size
                part.groups(name)[places.to(device)] = came
    return parts


def _chosen(
    parts: Sequence[Part], former: int, groups: Tensor, name: str, width: int, device: torch.device
) -> Tensor:
    """Copies of a field of some groups of rows that this rank holds: [n, ROWS, width]."""
    chosen = torch.empty(len(groups), ROWS, width, device=device)
    for part in parts:
        mine = groups % former == part.owner
        field = part.groups(name)
        chosen[mine.to(device)] = field[(groups[mine] // former).to(device)]
    return chosen


def fetch(
    transport: Transport,
    tables: Sequence[DistributedTable],
    wanted: Sequence[Sequence[Tensor]],
    trains: bool,
    has_failed: bool = False,
) -> list[list[Fetched]]:
    """Have rows from their owners; a collective of three messages.

    Args:
        transport: the group of ranks.
        tables: the tables.
        wanted: for each table, rows that are looked up together: int64 [n] each, ascending.
        trains: whether they take gradients.
        has_failed: whether this rank does not know what it wants.

    Returns:
        For each table, the rows as they are wanted.

    Raises:
        SomeRankFailed: on all ranks, if one of them has.
    """
    ranks = range(transport.size)
    asked = [table.ask(of_table) for table, of_table in zip(tables, wanted, strict=True)]
    parcels = [[each.parcels[owner] for each in asked] for owner in ranks]
    requests = deliver(transport, parcels, [len(tables)] * transport.size, has_failed)
    answers = [
        [table.answer(ids) for table, ids in zip(tables, of_rank, strict=True)]
        for of_rank in requests
    ]
    shapes = [
        [
            torch.Size((len(ids), table.table.dim))
            for table, ids in zip(tables, of_rank, strict=True)
        ]
        for of_rank in parcels
    ]
    rows = swap_rows(transport, answers, shapes)
    return [
        table.take(each, [rows[owner][number] for owner in ranks], of_table, trains)
        for number, (table, each, of_table) in enumerate(zip(tables, asked, wanted, strict=True))
    ]


def reduce(
    transport: Transport, tables: Sequence[DistributedTable], nodes: Sequence[Sequence[Node]]
) -> None:
    """Sum the gradients of each row on those that step it; a collective of three messages.

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
    dims = [[t.table.dim for t in tables for _ in of_rank] for of_rank in nodes]
    shapes = [
        [torch.Size((len(some), dim)) for some, dim in zip(of_rank, of_dims, strict=True)]
        for of_rank, of_dims in zip(ids, dims, strict=True)
    ]
    rows = swap_rows(transport, [[each.rows for each in to] for to in parcels], shapes)
    every = [node for of_rank in nodes for node in of_rank]
    for number, table in enumerate(tables):
        sums: list[RowSum] = []
        for rank in ranks:
            first = number * len(nodes[rank])
            part = slice(first, first + len(nodes[rank]))
            sums += map(RowSum, ids[rank][part], rows[rank][part])
        table.sum_up(sums, every)
