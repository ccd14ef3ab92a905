"""What a pass of the trial has come to, and how two of them are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.engine.passes.buffers import same_bits
from lockstep.errors import TaskError

_WHY = (
    "though samples, random state, parameters and buffers were the same; something keeps "
    "state between batches, or draws from a generator of its own (use torch's, numpy's or "
    "Python's global one, or lockstep.generator())"
)


class Outcome(NamedTuple):
    """One pass: everything that must be the same the next time."""

    batch: str
    drawn: list[object]
    values: dict[str, Any]
    gradients: dict[str, int | None]
    """Checksums by the parameter's name; None for those that are absent, or on a GPU, where sums
    may come in any order."""
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
    """Refuse a task of which the same microbatch does not come to the same.

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
    """What to say of a split that gives other samples the second time."""
    return f"dataset({split!r}): gave another batch when the same was fetched again, {_WHY}"


def check_evaluated(split: str, first: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    """Refuse a task of which the same batch does not evaluate to the same.

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
        TaskError: naming which of the two does.
    """
    for one, two, what in zip(
        first.drawn, second.drawn, ("dataset('train')", "Task.loss"), strict=True
    ):
        if one != two:
            raise TaskError(
                f"{what}: drew other random numbers when the same was computed again; a random "
                "value is kept, and what it is depends on which microbatch came first. Keep "
                "what was read, and draw anew each time"
            )


def check_rehearsed(where: str, expected: Outcome, now: Outcome) -> None:
    """Refuse a task that needs parameters of blocks which are not being computed.

    Args:
        where: what the message calls the loss.
        expected: outcome with all parameters.
        now: outcome with those of the present block only.

    Raises:
        TaskError: naming what differs.
    """
    for name, value in expected.values.items():
        if not all(map(_same, value, now.values[name])):
            raise TaskError(read_elsewhere(f"{where}: {name}"))
    for name, gradient in expected.gradients.items():
        if gradient != now.gradients[name]:
            raise TaskError(read_elsewhere(f"{where}: the gradient of {name}"))


def read_elsewhere(what: str) -> str:
    """What to say of something that comes out otherwise in a rehearsal."""
    return (
        f"{what} comes out otherwise when the parameters of each block are there only while it is "
        "computed (sharding=parameters), so something else reads them: a loss or metric by itself, "
        "a block that returns a parameter or a view of one, or keeps one, or gradients that the "
        "loss computes. Compute with what the model gives, or set sharding=gradients"
    )


def _same(one: Any, two: Any) -> bool:
    """Whether two tensors or numbers are equal to the bit."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return same_bits(one, two)
    return repr(one) == repr(two)
