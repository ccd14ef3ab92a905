"""All tables at once: rows go to who looks them up, their gradients to who steps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.tables.exchange import deliver, swap_rows
from lockstep.engine.tables.table import DealtTable
from lockstep.nn.tables.sparse_embedding import Lent
from lockstep.parallel.layout import Node
from lockstep.parallel.row_sums import RowSum


def lend(
    transport: Transport,
    tables: Sequence[DealtTable],
    wanted: Sequence[Sequence[Tensor]],
    trains: bool,
    has_failed: bool = False,
) -> list[list[Lent]]:
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
    transport: Transport, tables: Sequence[DealtTable], nodes: Sequence[Sequence[Node]]
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
