"""Rows on their way from those that held them to those that own them in another group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.tables.exchange import swap
from lockstep.engine.tables.part import Part, widths
from lockstep.engine.tables.table import DealtTable
from lockstep.parallel.row_layout import ROWS, RowLayout

_GROUPS_AT_ONCE = 4096
"""Groups of rows of the table that are on their way at a time: what it takes in memory."""


class Described(NamedTuple):
    """What a rank holds of a table.

    Attributes:
        size: number of ranks that the table was dealt out to; 0 for nothing.
        owners: whose rows they are.
    """

    size: int
    owners: list[int]


def deal(
    transport: Transport,
    dealt: DealtTable,
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
        layout: how rows are to be dealt out.
        shifts: how many ranks before a rank those are whose rows it is to hold.
        device: device that they are on.

    Returns:
        None, on all ranks, if some rows are held by nobody.
    """
    rank, size = transport.rank, transport.size
    parts = [Part.empty(dealt.table, layout, (rank - shift) % size, device) for shift in shifts]
    # All that is held was dealt out to one group: ranks change what they hold together.
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
