"""Which rank owns which rows of a table: a function of the row's number and of the group's size."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ROWS = 16
"""Rows of a group: those with the numbers 0 to 15, 16 to 31 and so on are with the same rank."""


class RowLayout(NamedTuple):
    """Rows dealt out to ranks by groups in turn, so that neighbours in use are with many ranks.

    Attributes:
        num_rows: rows of the table.
        size: number of ranks.
    """

    num_rows: int
    size: int

    @property
    def num_groups(self) -> int:
        """Groups of rows of the whole table; the last one may be incomplete."""
        return -(-self.num_rows // ROWS)

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that owns each row, int64 like `ids`."""
        return ids // ROWS % self.size

    def local(self, ids: Tensor) -> Tensor:
        """The place of each row among those of its owner, int64 like `ids`."""
        return ids // (ROWS * self.size) * ROWS + ids % ROWS

    def groups(self, owner: int) -> range:
        """The numbers of an owner's groups of rows."""
        return range(owner, self.num_groups, self.size)

    def num_local(self, owner: int) -> int:
        """Rows of memory that an owner needs: whole groups."""
        return len(self.groups(owner)) * ROWS
