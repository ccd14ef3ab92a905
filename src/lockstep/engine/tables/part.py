"""The rows of a table that one rank owns, and what its optimizer keeps of them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lockstep.engine.digests import memory_of
from lockstep.nn.tables.sparse_embedding import SparseEmbedding
from lockstep.parallel.row_layout import ROWS, RowLayout
from lockstep.parallel.row_sums import RowSum

WEIGHT = "weight"
"""Name of the field that rows themselves are in."""
_STARTED_AT_ONCE = 4096
"""Groups of rows whose values at the start are drawn at a time."""


def widths(table: SparseEmbedding) -> dict[str, int]:
    """The fields of each row: how many float32 numbers each has, by name."""
    return {WEIGHT: table.dim, **table.optimizer.widths(table.dim)}


def num_of_last(layout: RowLayout) -> int:
    """The number of rows that the owner of the last group has of the table."""
    return (layout.num_groups - 1) // layout.size * ROWS + (layout.num_rows - 1) % ROWS + 1


class Part:
    """Rows of one owner.

    Attributes:
        layout: how the table's rows are dealt out.
        owner: whose they are.
        fields: of each row, by name: float32 [rows of memory, width].
    """

    def __init__(self, layout: RowLayout, owner: int, fields: dict[str, Tensor]) -> None:
        self.layout, self.owner, self.fields = layout, owner, fields

    @classmethod
    def empty(
        cls, table: SparseEmbedding, layout: RowLayout, owner: int, device: torch.device
    ) -> Part:
        """Memory for an owner's rows, all zero."""
        num_rows = layout.num_local(owner)
        fields = {
            name: torch.zeros(num_rows, width, device=device)
            for name, width in widths(table).items()
        }
        return cls(layout, owner, fields)

    @classmethod
    def start(
        cls, table: SparseEmbedding, layout: RowLayout, owner: int, device: torch.device
    ) -> Part:
        """An owner's rows as they are before the first step."""
        part = cls.empty(table, layout, owner, device)
        if table.std:  # else zeros, whose memory need not be there before it is used
            groups = torch.tensor(layout.groups(owner), dtype=torch.int64)
            for place, chosen in enumerate(torch.split(groups, _STARTED_AT_ONCE)):
                first = place * _STARTED_AT_ONCE * ROWS
                part.fields[WEIGHT][first : first + len(chosen) * ROWS] = table.start(chosen)
            if owner == (layout.num_groups - 1) % layout.size:
                # As they are in a part that was loaded: digests go over whole groups.
                part.fields[WEIGHT][num_of_last(layout) :] = 0.0
        return part

    def rows(self, ids: Tensor) -> Tensor:
        """Copies of rows of this owner: float32 [n, dim]."""
        return self.fields[WEIGHT][self.layout.local(ids)]

    def step(self, table: SparseEmbedding, gradients: RowSum, lr: float) -> None:
        """Step the rows that have a gradient."""
        places = self.layout.local(gradients.ids)
        stepped = {name: field[places] for name, field in self.fields.items()}
        state = {name: field for name, field in stepped.items() if name != WEIGHT}
        table.optimizer.step(stepped[WEIGHT], state, gradients.rows, lr)
        for name, field in stepped.items():
            self.fields[name][places] = field

    def groups(self, name: str) -> Tensor:
        """A field by groups of rows: a view [groups, ROWS, width]."""
        field = self.fields[name]
        return field.view(len(field) // ROWS, ROWS, field.shape[1])

    def digest(self) -> int:
        """The sum of the digests of all groups of rows.

        So the digests of all owners' parts add up to the same number, whoever they are.
        """
        groups = self.layout.groups(self.owner)
        count = len(groups)
        if not count:
            return 0
        plain = {n: f.cpu().contiguous().view(count, -1) for n, f in sorted(self.fields.items())}
        memory = {name: memoryview(memory_of(field)).cast("B") for name, field in plain.items()}
        total = 0
        for place, group in enumerate(groups):
            sha = hashlib.sha256(group.to_bytes(8, "little"))
            for name, field in plain.items():
                size = field.shape[1] * field.itemsize
                sha.update(memory[name][place * size : (place + 1) * size])
            total += int.from_bytes(sha.digest(), "little")
        return total % 2**256
