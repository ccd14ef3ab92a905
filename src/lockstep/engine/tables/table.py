"""One table of a run: the rows that this rank owns, and how ranks fetch and step rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.engine.digests import bytes_of
from lockstep.errors import TaskError
from lockstep.nn.sparse_embedding import Fetched, SparseEmbedding
from lockstep.optim.rows import row_norms
from lockstep.parallel.layout import ROWS, Assigned, Node, Range, RowLayout, leaves, merges

WEIGHT = "weight"
"""Name of the field with the rows themselves."""

_STARTED_AT_ONCE = 4096
"""Groups of rows whose initial values are drawn at a time."""
_NUM_ROWS, _NUM_STEPS, _LR = 37, 2, 0.1
_CHOSEN = (5, 6, 11, 12, 30)


def widths(table: SparseEmbedding) -> dict[str, int]:
    """The number of float32 values of each field of a row, by name."""
    return {WEIGHT: table.dim, **table.optimizer.widths(table.dim)}


class DistributedTable:
    """A table in the present group of ranks.

    Attributes:
        name: name of the module.
        module: the module.
        parts: rows of this rank, and copies of those of the rank before it if it is its buddy.
    """

    def __init__(self, name: str, module: SparseEmbedding, num_microbatches: int) -> None:
        self.name, self.module = name, module
        self.parts: list[Part] = []
        self._num_microbatches = num_microbatches
        self._sums: list[RowSum] | None = None

    def begin(self, microbatches: Assigned) -> None:
        """Forget the gradients of another step, or of another try of this one."""
        self._fold = RowFold(microbatches, self._num_microbatches)
        self._sums = None

    @property
    def _layout(self) -> RowLayout:
        return self.parts[0].layout

    @property
    def _weight(self) -> Tensor:
        return self.parts[0].fields[WEIGHT]

    def request(self, wanted: Sequence[Tensor]) -> RowRequest:
        """The rows to request from each owner.

        Args:
            wanted: rows that are looked up together, ascending: int64 [n] each.
        """
        none = torch.empty(0, dtype=torch.int64, device=self._weight.device)
        ids = torch.unique(torch.cat([none, *wanted]))
        owners = self._layout.owner(ids)
        by_owner = torch.argsort(owners, stable=True)
        counts = torch.bincount(owners, minlength=self._layout.size)
        return RowRequest(ids, by_owner, list(torch.split(ids[by_owner], counts.tolist())))

    def answer(self, ids: Tensor) -> Tensor:
        """Copies of rows that this rank owns: float32 [n, dim]."""
        return self._weight[self._layout.local(ids)]

    def take(
        self,
        request: RowRequest,
        answers: Sequence[Tensor],
        wanted: Sequence[Tensor],
        trains: bool,
    ) -> list[Fetched]:
        """The rows for each lookup, from the answers of all owners.

        Args:
            request: what `request` has returned.
            answers: requested rows of each owner: float32 [n, dim] each.
            wanted: as for `request`.
            trains: whether rows take gradients.
        """
        rows = self._weight.new_empty(len(request.ids), self.module.dim)
        rows[request.by_owner] = torch.cat(list(answers))
        return [
            Fetched(some, rows[torch.searchsorted(request.ids, some)].requires_grad_(trains))
            for some in wanted
        ]

    def add(self, fetched: Fetched | None) -> None:
        """Take the gradients of the next microbatch; None if it looked nothing up."""
        gradient = fetched.rows.grad if fetched is not None else None
        if fetched is None or gradient is None:
            self._fold.add(nothing(self.module.dim, self._weight))
        else:
            self._fold.add(RowSum(fetched.ids, gradient))

    def gradients(self, rank: int) -> list[list[RowSum]]:
        """For each rank, what it receives of each of this rank's nodes.

        Args:
            rank: rank of this process.
        """
        size, nodes = self._layout.size, self._fold.sums
        owners = [self._layout.owner(node.ids) for node in nodes]
        # All ranks have the rows of the same neighbours.
        shifts = rank - torch.tensor([p.owner for p in self.parts], device=self._weight.device)
        stepped = [(to - shifts) % size for to in range(size)]
        return [
            [node.of(torch.isin(own, theirs)) for node, own in zip(nodes, owners, strict=True)]
            for theirs in stepped
        ]

    def sum_up(self, sums: Sequence[RowSum], nodes: Sequence[Node]) -> None:
        """Sum the gradients of the rows that this rank steps.

        Args:
            sums: sums of these rows in each node of all ranks.
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
        """Step the rows that have a gradient, once; not a collective.

        Args:
            unit: factor of the summed gradients.
            lr: learning rate of this step.
        """
        if self._sums is None:
            return
        for part, gradients in zip(self.parts, self._sums, strict=True):
            part.step(self.module, RowSum(gradients.ids, gradients.rows * unit), lr)
        self._sums = None

    def skip(self) -> None:
        """Step nothing."""
        self._sums = None


class RowRequest(NamedTuple):
    """Rows that this rank requests from their owners.

    Attributes:
        ids: their numbers, ascending, each once: int64 [n].
        by_owner: their places in `ids`, those of rank 0 first: int64 [n].
        of_owners: the rows of each owner, ascending: int64 [any] each.
    """

    ids: Tensor
    by_owner: Tensor
    of_owners: list[Tensor]


class Part:
    """Rows of one owner.

    Attributes:
        layout: how the table's rows are distributed.
        owner: the rank that owns them.
        fields: fields of all rows, by name: float32 [rows of memory, width].
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
        if table.std:  # else zeros, whose memory is allocated when it is first used
            groups = torch.tensor(layout.groups(owner), dtype=torch.int64)
            for place, chosen in enumerate(torch.split(groups, _STARTED_AT_ONCE)):
                first = place * _STARTED_AT_ONCE * ROWS
                part.fields[WEIGHT][first : first + len(chosen) * ROWS] = table.start(chosen)
            if owner == (layout.num_groups - 1) % layout.size:
                # As in a part that was loaded, since digests cover whole groups.
                part.fields[WEIGHT][num_of_last(layout) :] = 0.0
        return part

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

        So the sum over all owners does not depend on how rows are distributed.
        """
        groups = self.layout.groups(self.owner)
        count = len(groups)
        if not count:
            return 0
        plain = {n: f.cpu().contiguous().view(count, -1) for n, f in sorted(self.fields.items())}
        memory = {name: memoryview(bytes_of(field)).cast("B") for name, field in plain.items()}
        total = 0
        for place, group in enumerate(groups):
            sha = hashlib.sha256(group.to_bytes(8, "little"))
            for name, field in plain.items():
                size = field.shape[1] * field.itemsize
                sha.update(memory[name][place * size : (place + 1) * size])
            total += int.from_bytes(sha.digest(), "little")
        return total % 2**256


def num_of_last(layout: RowLayout) -> int:
    """The number of rows that the owner of the last group has of the table."""
    return (layout.num_groups - 1) // layout.size * ROWS + (layout.num_rows - 1) % ROWS + 1


def check_row_optimizer(name: str, table: SparseEmbedding) -> None:
    """Refuse an optimizer whose steps depend on more than a row, its gradient and its state.

    Args:
        name: of the table.
        table: table with the optimizer.

    Raises:
        TaskError: it cannot step rows, or not each row by itself.
    """
    where = f"the optimizer of table {name} ({type(table.optimizer).__name__})"
    generator = torch.Generator().manual_seed(0)
    rows, *gradients = torch.randn(1 + _NUM_STEPS, _NUM_ROWS, table.dim, generator=generator)
    chosen = torch.tensor(_CHOSEN)
    try:
        whole = _stepped(table, rows, gradients)
        again = _stepped(table, rows, gradients)
        alone = _stepped(table, rows[chosen], [g[chosen] for g in gradients])
    except Exception as error:
        raise TaskError(f"{where}: cannot step rows: {type(error).__name__}: {error}") from None
    for field, values in whole.items():
        if not bool(values.isfinite().all()):
            raise TaskError(f"{where}: makes {field} NaN or infinite from numbers that are not")
        if not torch.equal(values, again[field]):
            raise TaskError(
                f"{where}: made other rows when it stepped the same again: it draws random "
                "numbers, or has state beside `state`, whose names `widths` gives"
            )
        if not torch.equal(values[chosen], alone[field]):
            raise TaskError(
                f"{where}: steps a row differently when others are stepped beside it; each rank "
                "steps other rows, so compute each row from itself alone"
            )


def _stepped(
    table: SparseEmbedding, rows: Tensor, gradients: Sequence[Tensor]
) -> dict[str, Tensor]:
    """All fields of some rows after a few steps."""
    fields = {name: torch.zeros(len(rows), width) for name, width in widths(table).items()}
    fields[WEIGHT] = rows.clone()
    state = {name: field for name, field in fields.items() if name != WEIGHT}
    for gradient in gradients:
        table.optimizer.step(fields[WEIGHT], state, gradient.clone(), _LR)
    return fields


class RowSum(NamedTuple):
    """Sums of some rows.

    Attributes:
        ids: numbers of the rows, ascending, each once: int64 [n].
        rows: their sums: [n, dim].
    """

    ids: Tensor
    rows: Tensor

    def of(self, chosen: Tensor) -> RowSum:
        """Those of some rows, by a mask or by ascending indices."""
        return RowSum(self.ids[chosen], self.rows[chosen])


def nothing(dim: int, like: Tensor) -> RowSum:
    """Sums of no rows, of the dtype and on the device of `like`."""
    return RowSum(like.new_empty(0, dtype=torch.int64), like.new_empty(0, dim))


def added(left: RowSum, right: RowSum) -> RowSum:
    """The sums of two; a row that one of them lacks is the other's, to the bit."""
    if not len(left.ids) or not len(right.ids):
        return right if len(right.ids) else left
    both, places = torch.unique(torch.cat([left.ids, right.ids]), return_inverse=True)
    rows = left.rows.new_empty(len(both), left.rows.shape[1])
    of_left, of_right = places[: len(left.ids)], places[len(left.ids) :]
    # First the right one, so that the left one's rows are then sums in the order left + right.
    rows[of_right] = right.rows
    in_both = torch.isin(left.ids, right.ids, assume_unique=True)
    mine = torch.where(in_both[:, None], left.rows + rows[of_left], left.rows)
    rows[of_left] = mine
    return RowSum(both, rows)


def plan(microbatches: Assigned, num_microbatches: int) -> tuple[list[int], list[Node]]:
    """As `layout.merges`, of the microbatches of a rank, which need not lie side by side."""
    own = [node for node in leaves(microbatches) if node.first < num_microbatches]
    if isinstance(microbatches, Range):
        return merges(own, num_microbatches)
    return [0] * len(own), own


class RowFold:
    """Sums of a rank's own microbatches, as far as the canonical tree allows without the others.

    Attributes:
        nodes: nodes of the tree that are left, from left to right.
    """

    def __init__(self, microbatches: Assigned, num_microbatches: int) -> None:
        """Prepare to add the microbatches, from left to right.

        Args:
            microbatches: microbatches of this rank; those with numbers that are too high are none.
            num_microbatches: number of microbatches of the whole global batch.
        """
        self._merges, self.nodes = plan(microbatches, num_microbatches)
        self._next = 0
        self.sums: list[RowSum] = []

    def add(self, leaf: RowSum) -> None:
        """Add the next microbatch."""
        self.sums.append(leaf)
        _merge(self.sums, self._merges[self._next])
        self._next += 1


def total(sums: Sequence[RowSum], nodes: Sequence[Node], num_microbatches: int) -> RowSum:
    """The sum of the nodes of all ranks.

    Args:
        sums: of each node, from left to right.
        nodes: all nodes, which together are the whole tree.
        num_microbatches: number of leaves of the tree.
    """
    counts, _ = merges(nodes, num_microbatches)
    stack: list[RowSum] = []
    for node, count in zip(sums, counts, strict=True):
        stack.append(node)
        _merge(stack, count)
    return stack[0]


def _merge(stack: list[RowSum], count: int) -> None:
    for _ in range(count):
        right = stack.pop()
        stack[-1] = added(stack[-1], right)
