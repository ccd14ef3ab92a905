"""Results of the trial's passes, and a rehearsal of passes with parameters of one block at a time.

Once parameters are in slices, other code that reads them (a loss that penalises a weight, a block
that returns one, a view that was kept) would find other numbers, or freed memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.engine.digests import checksum
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.passes.buffers import same_bits
from lockstep.errors import TaskError
from lockstep.nn.row import Row

_WHY = (
    "though samples, random state, parameters and buffers were the same; something keeps "
    "state between batches, or draws from a generator of its own (use torch's, numpy's or "
    "Python's global one, or lockstep.generator())"
)


class Outcome(NamedTuple):
    """The result of a pass: everything that must be the same the next time."""

    batch: str
    drawn: list[object]
    values: dict[str, Any]
    gradients: dict[str, int | None]
    """Checksums by the parameter's name; None for those that are absent, or on a GPU, where the
    order of sums is not fixed."""
    changed: list[str]
    carry: str
    """SHA-256 of what the microbatch carries to the next step; empty if it carries nothing."""
    rows: str
    """SHA-256 of the gradients of rows of tables; empty without tables, and on a GPU."""

    @property
    def digest(self) -> str:
        """SHA-256 of loss, metrics, gradients and the carry."""
        sha = hashlib.sha256()
        for name, pair in sorted(self.values.items()):
            sha.update(f"{name} {[float(v) for v in pair]}\n".encode())
        for name, gradient in self.gradients.items():
            sha.update(f"{name} {gradient}\n".encode())
        sha.update(self.carry.encode() + self.rows.encode())
        return sha.hexdigest()


def check_equal(first: Outcome, second: Outcome) -> None:
    """Refuse a task that gives other results for the same microbatch.

    Raises:
        TaskError: naming what differs.
    """
    why = _WHY
    if first.batch != second.batch:
        raise TaskError(another_batch("train"))
    _check_drawn(first, second)
    for name, value in first.values.items():
        if not all(map(_same, value, second.values[name])):
            raise TaskError(
                f"Task.loss: gave another {name} when the same batch was computed again, {why}"
            )
    if first.carry != second.carry:
        raise TaskError(
            "Task.loss: gave another carry when the same batch was computed again from the "
            f"same carry, {why}"
        )
    for name, gradient in first.gradients.items():
        if gradient != second.gradients[name]:
            raise TaskError(
                f"parameter {name}: got another gradient when the same batch was computed "
                f"again, {why}"
            )
    if first.rows != second.rows:
        raise TaskError(
            "the rows of a SparseEmbedding got other gradients, or other rows were looked up "
            f"(Task.lookups), when the same batch was computed again, {why}"
        )


def another_batch(split: str) -> str:
    """The error message about a split that gives other samples the second time."""
    return f"dataset({split!r}): gave another batch when the same was fetched again, {_WHY}"


def check_evaluated(split: str, first: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    """Refuse a task whose evaluation of the same batch gives other metrics.

    Args:
        split: name of the split.
        first: metrics of its first batch by name.
        again: those after another batch.

    Raises:
        TaskError: naming a metric.
    """
    for name, value in first.items():
        if repr(value) != repr(again.get(name)):
            raise TaskError(
                f"Task.evaluate: gave another {name} of {split} when the same batch was evaluated "
                f"again after another one, {_WHY}"
            )


def _check_drawn(first: Outcome, second: Outcome) -> None:
    """Refuse a dataset or loss that draws another number of random values the second time.

    Raises:
        TaskError: naming the one that does.
    """
    for one, two, what in zip(
        first.drawn, second.drawn, ("dataset('train')", "Task.loss"), strict=True
    ):
        if one != two:
            raise TaskError(
                f"{what}: drew other random numbers when the same was computed again; a random "
                "value is kept, and what it is depends on which microbatch came first. Keep "
                "what was read, and draw again each time"
            )


def check_rehearsed(
    where: str, expected: Outcome, now: Outcome, explained: Callable[[str], str]
) -> None:
    """Refuse a task that reads parameters of other blocks than the one that is computed.

    Args:
        where: name of the loss in the message.
        expected: outcome with all parameters.
        now: outcome with those of the present block only.
        explained: makes the message of what differs.

    Raises:
        TaskError: naming what differs.
    """
    for name, value in expected.values.items():
        if not all(map(_same, value, now.values[name])):
            raise TaskError(explained(f"{where}: {name}"))
    for name, gradient in expected.gradients.items():
        if gradient != now.gradients[name]:
            raise TaskError(explained(f"{where}: the gradient of {name}"))


def read_on_other_rank(subject: str) -> str:
    """The error message about a result that differs in a rehearsal."""
    return (
        f"{subject} differs when the parameters of each block are in memory only while it is "
        "computed (sharding=parameters), so something else reads them: a loss or metric by itself, "
        "a block that returns a parameter or a view of one, or keeps one, or gradients that the "
        "loss computes. Compute with what the model gives, or set sharding=gradients"
    )


def _same(one: Any, two: Any) -> bool:
    """Whether two tensors or numbers are equal to the bit."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return same_bits(one, two)
    return repr(one) == repr(two)


class OneBlock:
    """Storage of a row whose parameters are there one block at a time. Not a collective.

    Gradients are freed when their block is left, for there is no memory for all.

    Attributes:
        gradients: checksums of those that were freed in this pass, by the parameter's id.
    """

    def __init__(self, row: Row, flat: FlatTensors) -> None:
        """Prepare.

        Args:
            row: blocks of a model.
            flat: its trainable parameters, with segments for each block.
        """
        self._row, self._flat = row, flat
        self._users: Counter[int] = Counter()
        self._next = -1
        self.gradients: dict[int, int] = {}
        segments = {id(t): e.segment for t, e in zip(flat.tensors, flat.entries, strict=True)}
        self._needed = [
            sorted({segments[id(p)] for p in row.parameters_of(block) if id(p) in segments})
            for block in range(row.num_blocks)
        ]
        uses = Counter(segment for needed in self._needed for segment in needed)
        self._of_one_block = {segment for segment, num in uses.items() if num == 1}

    def _bring(self, segment: int) -> None:
        """Have the parameters of a segment."""
        raise NotImplementedError

    def _take(self, segment: int) -> None:
        """Have them no longer."""
        raise NotImplementedError

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Use it for the model within the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Use it for the model."""
        self._row.storage, self._row.descend = self, self.descend
        self.end_pass()

    def end(self) -> None:
        """Use it no longer."""
        self.end_pass()
        self._row.storage = self._row.descend = None

    def end_pass(self) -> None:
        """Free all blocks."""
        self._users.clear()
        for segment in range(len(self._flat.segments)):
            self._take(segment)

    def unshard(self, block: int) -> None:
        """See `lockstep.nn.holding.Storage`."""
        for segment in self._needed[block]:
            self._users[segment] += 1
            if self._users[segment] == 1:
                self._bring(segment)

    def prefetch(self, block: int) -> None:
        """Nothing to do: nothing travels."""

    def reshard(self, block: int) -> None:
        """See `lockstep.nn.holding.Storage`."""
        last = self._row.num_blocks - 1
        if torch.is_grad_enabled() and block == last:
            self._next = last - 1  # its backward pass comes next
        else:
            self._drop(block)

    def skip_forward(self) -> None:
        """Nothing to do: there are no other ranks."""

    def descend(self, block: int) -> None:
        """Begin the backward pass of a block, when that of the next ones is over."""
        while self._next >= block:
            self._take_gradients(self._next + 1)
            self._drop(self._next + 1)
            self.unshard(self._next)
            self._next -= 1

    def _take_gradients(self, block: int) -> None:
        for segment in self._of_one_block.intersection(self._needed[block]):
            for tensor in self._flat.tensors_of(segment):
                gradient = tensor.grad
                if gradient is None or gradient.layout != torch.strided:
                    continue
                if gradient.is_cpu:  # the trial has no checksums of others to compare with
                    self.gradients[id(tensor)] = checksum(gradient)
                tensor.grad = None

    def _drop(self, block: int) -> None:
        for segment in self._needed[block]:
            self._users[segment] -= 1
            if not self._users[segment]:
                self._take(segment)


class Rehearsal(OneBlock):
    """Fills with NaN what would be freed. Views see that too, since they share the memory."""

    def __init__(self, row: Row, flat: FlatTensors) -> None:
        """Keep a copy of all parameters, which are all in memory; see `OneBlock`."""
        super().__init__(row, flat)
        self._kept = [memory.clone() for memory in flat.flats]

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Use it for the model within the block; restore all parameters after it."""
        try:
            with super().begun():
                yield
        finally:
            for memory, kept in zip(self._flat.flats, self._kept, strict=True):
                memory.copy_(kept)

    def _bring(self, segment: int) -> None:
        self._flat.flats[segment].copy_(self._kept[segment])

    def _take(self, segment: int) -> None:
        self._flat.flats[segment].fill_(float("nan"))
