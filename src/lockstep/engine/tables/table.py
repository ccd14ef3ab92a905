"""One table of a run: its rows are with their owners, and lent to the ranks that look them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.engine.tables.part import WEIGHT, Part
from lockstep.nn.tables.sparse_embedding import Lent, SparseEmbedding
from lockstep.optim.rows import row_norms
from lockstep.parallel.layout import Dealt, Node
from lockstep.parallel.row_layout import RowLayout
from lockstep.parallel.row_sums import RowFold, RowSum, nothing, total


class Asked(NamedTuple):
    """Rows that this rank has asked their owners for.

    Attributes:
        ids: their numbers, ascending, each once: int64 [n].
        by_owner: their places in `ids`, those of rank 0 first: int64 [n].
        parcels: the rows of each owner, ascending: int64 [any] each.
    """

    ids: Tensor
    by_owner: Tensor
    parcels: list[Tensor]


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

    def ask(self, wanted: Sequence[Tensor]) -> Asked:
        """The rows that are wanted of each owner.

        Args:
            wanted: rows that are looked up together, ascending: int64 [n] each.
        """
        none = torch.empty(0, dtype=torch.int64, device=self._weight.device)
        ids = torch.unique(torch.cat([none, *wanted]))
        owners = self._layout.owner(ids)
        by_owner = torch.argsort(owners, stable=True)
        counts = torch.bincount(owners, minlength=self._layout.size)
        return Asked(ids, by_owner, list(torch.split(ids[by_owner], counts.tolist())))

    def answer(self, ids: Tensor) -> Tensor:
        """Copies of rows that this rank owns: float32 [n, dim]."""
        return self.parts[0].rows(ids)

    def take(
        self, asked: Asked, answers: Sequence[Tensor], wanted: Sequence[Tensor], trains: bool
    ) -> list[Lent]:
        """What has been wanted, from the answers of all owners.

        Args:
            asked: what `ask` has returned.
            answers: rows of each owner that were asked for: float32 [n, dim] each.
            wanted: as for `ask`.
            trains: whether rows take gradients.
        """
        rows = self._weight.new_empty(len(asked.ids), self.table.dim)
        rows[asked.by_owner] = torch.cat(list(answers))
        return [
            Lent(some, rows[torch.searchsorted(asked.ids, some)].requires_grad_(trains))
            for some in wanted
        ]

    def add(self, lent: Lent | None) -> None:
        """Take the gradients of the next microbatch; None if it looked nothing up."""
        gradient = lent.rows.grad if lent is not None else None
        if lent is None or gradient is None:
            self._fold.add(nothing(self.table.dim, self._weight))
        else:
            self._fold.add(RowSum(lent.ids, gradient))

    def gradients(self, rank: int) -> list[list[RowSum]]:
        """For each rank, what it is to get of each of this rank's nodes.

        Args:
            rank: rank of this process.
        """
        size, nodes = self._layout.size, self._fold.sums
        owners = [self._layout.owner(node.ids) for node in nodes]
        behind = [(rank - part.owner) % size for part in self.parts]
        whose = [
            torch.tensor([(to - shift) % size for shift in behind], device=self._weight.device)
            for to in range(size)
        ]
        return [
            [node.of(torch.isin(own, held)) for node, own in zip(nodes, owners, strict=True)]
            for held in whose
        ]

    def sum_up(self, sums: Sequence[RowSum], nodes: Sequence[Node]) -> None:
        """Sum the gradients of the rows that this rank steps.

        Args:
            sums: what all ranks have of these rows in each of their nodes.
            nodes: these nodes.
        """
        ordered = sorted(zip(nodes, sums, strict=True), key=lambda pair: pair[0].first)
        in_order = [node for node, _ in ordered]
        whole = total([each for _, each in ordered], in_order, self._num_microbatches)
        owners = self._layout.owner(whole.ids)
        self._sums = [whole.of(owners == part.owner) for part in self.parts]

    def summed(self) -> Tensor:
        """The summed gradients of the rows that this rank owns: [n, columns]."""
        assert self._sums is not None, "reduce comes first"
        return self._sums[0].rows

    def norms(self) -> Tensor:
        """The norms of `summed`: float64 [n]."""
        return row_norms(self.summed()).double().cpu()

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
