"""One table of a run: its rows are with their owners, and lent to the ranks that look them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.tables.exchange import swap, tell_counts
from lockstep.engine.tables.part import WEIGHT, Part
from lockstep.nn.tables.sparse_embedding import Lent, SparseEmbedding
from lockstep.optim.rows import row_norms
from lockstep.parallel.layout import Dealt
from lockstep.parallel.row_layout import RowLayout
from lockstep.parallel.row_sums import RowFold, RowSum, nothing, plan, total


class DealtTable:
    """A table, as far as this rank has to do with it.

    Attributes:
        name: of the module.
        table: the module.
        parts: rows of this rank, and those of the rank before it if it is that one's buddy.
    """

    def __init__(self, name: str, table: SparseEmbedding, num_microbatches: int) -> None:
        self.name, self.table = name, table
        self.parts: list[Part] = []
        self._num_microbatches = num_microbatches
        self._sums: list[RowSum] | None = None

    def begin(self, microbatches: Dealt) -> None:
        """Forget another step's gradients, or those of another try of this one."""
        self._fold = RowFold(microbatches, self._num_microbatches)
        self._sums = None

    @property
    def _layout(self) -> RowLayout:
        return self.parts[0].layout

    @property
    def _weight(self) -> Tensor:
        return self.parts[0].fields[WEIGHT]

    def lend(self, transport: Transport, wanted: Sequence[Tensor], trains: bool) -> list[Lent]:
        """Have rows from their owners; a collective.

        Args:
            transport: the group of ranks.
            wanted: rows that are looked up together, ascending, each once: int64 [n] each.
            trains: whether they take gradients.
        """
        device = self._weight.device
        each = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64, device=device), *wanted]))
        owners = self._layout.owner(each)
        order = torch.argsort(owners, stable=True)
        counts = torch.bincount(owners, minlength=transport.size)
        told = tell_counts(transport, counts[:, None], [1] * transport.size)
        asked, mine = torch.cat(told).tolist(), counts.tolist()
        ids = swap(transport, each[order], mine, asked)
        rows = torch.empty(len(each), self.table.dim, device=device)
        rows[order] = swap(transport, self.parts[0].rows(ids), asked, mine)
        return [
            Lent(some, rows[torch.searchsorted(each, some)].requires_grad_(trains))
            for some in wanted
        ]

    def add(self, lent: Lent | None) -> None:
        """Take the gradients of the next microbatch; None if it looked nothing up."""
        gradient = lent.rows.grad if lent is not None else None
        if lent is None or gradient is None:
            self._fold.add(nothing(self.table.dim, self._weight))
        else:
            self._fold.add(RowSum(lent.ids, gradient))

    def reduce(self, transport: Transport, microbatches: Sequence[Dealt]) -> None:
        """Sum the gradients of each row on those that step it; a collective.

        Args:
            transport: the group of ranks.
            microbatches: those of each rank.
        """
        size, own = transport.size, self._fold.sums
        behind = [(transport.rank - part.owner) % size for part in self.parts]
        owners = [self._layout.owner(node.ids) for node in own]
        held = [
            torch.tensor([(rank - shift) % size for shift in behind], device=self._weight.device)
            for rank in range(size)
        ]
        parts = [
            node.of(torch.isin(of_node, by_rank))
            for by_rank in held
            for node, of_node in zip(own, owners, strict=True)
        ]
        of_rank = [plan(dealt, self._num_microbatches)[1] for dealt in microbatches]
        sums = self._swapped(transport, parts, [len(nodes) for nodes in of_rank])
        pairs = zip([node for nodes in of_rank for node in nodes], sums, strict=True)
        ordered = sorted(pairs, key=lambda pair: pair[0].first)
        nodes, sums = [node for node, _ in ordered], [each for _, each in ordered]
        whole = total(sums, nodes, self._num_microbatches)
        mine = self._layout.owner(whole.ids)
        self._sums = [whole.of(mine == part.owner) for part in self.parts]

    def _swapped(
        self, transport: Transport, parts: Sequence[RowSum], numbers: Sequence[int]
    ) -> list[RowSum]:
        """Send each rank its part of each of this rank's nodes, and receive theirs; a collective.

        Args:
            transport: the group of ranks.
            parts: those for rank 0, for rank 1 and so on.
            numbers: number of nodes of each rank.
        """
        size, empty = transport.size, nothing(self.table.dim, self._weight)
        counts = torch.tensor([len(part.ids) for part in parts], dtype=torch.int64)
        counts = counts.view(size, numbers[transport.rank])
        told = tell_counts(transport, counts.to(self._weight.device), numbers)
        mine, theirs = counts.sum(dim=1).tolist(), [int(t.sum()) for t in told]
        ids = swap(transport, torch.cat([empty.ids, *(p.ids for p in parts)]), mine, theirs)
        rows = swap(transport, torch.cat([empty.rows, *(p.rows for p in parts)]), mine, theirs)
        lengths = torch.cat(told).tolist()
        return list(map(RowSum, torch.split(ids, lengths), torch.split(rows, lengths)))

    def norms(self) -> Tensor:
        """The norms of the summed gradients of the rows that this rank owns: float64 [n]."""
        assert self._sums is not None, "reduce comes first"
        return row_norms(self._sums[0].rows).double().cpu()

    def apply(self, unit: float, lr: float) -> None:
        """Step the rows that have a gradient, once; talks to nobody.

        Args:
            unit: what summed gradients are multiplied with.
            lr: learning rate of this step.
        """
        if self._sums is None:
            return
        for part, gradients in zip(self.parts, self._sums, strict=True):
            part.step(self.table, RowSum(gradients.ids, gradients.rows * unit), lr)
        self._sums = None

    def skip(self) -> None:
        """Step nothing."""
        self._sums = None
