"""What a task's loss functions return, and the phases that have one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Number = Tensor | float | int


@dataclass(frozen=True)
class Loss:
    """The loss and metrics of one batch, as sums with their weights.

    Batches of different sizes are combined by adding sums and weights; the division happens
    once, at the end. So an uneven last batch counts for just what it holds.

    Attributes:
        sum: loss summed over the batch, a scalar tensor with a gradient.
        weight: divisor of the sum over the global batch, as a rule the number of samples.
        metrics: pairs (sum, weight) by name, scalars without gradient.
        updates: in evaluations, what each metric of `Task.metrics` is updated with: a tuple of
            arguments, a dict of them by name, or a tensor.
    """

    sum: Tensor
    weight: Number
    metrics: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    updates: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @classmethod
    def mean(
        cls,
        loss: Tensor,
        weight: Number,
        metrics: Mapping[str, tuple[Number, Number]] | None = None,
        updates: Mapping[str, Any] | None = None,
    ) -> Loss:
        """A loss from one that is a mean already, as torch's loss functions return by default.

        Args:
            loss: mean loss of the batch, a scalar tensor with a gradient.
            weight: divisor of the mean, as a rule the number of samples.
            metrics: pairs (sum, weight) by name, scalars without gradient.
            updates: arguments of the updates of the metrics of `Task.metrics`, by name.
        """
        return cls(loss * weight, weight, metrics or {}, updates=updates or {})


@dataclass(frozen=True)
class Phase:
    """One of several kinds of optimizer step that a task has in turn (a GAN's, for example).

    Attributes:
        name: its name; an identifier.
        loss: as `Task.loss`, a function of the model and a batch, and of the carry if there is one.
        steps: number of optimizer steps that it has, before the next phase's turn.
    """

    name: str
    loss: Callable[..., Any]
    steps: int = 1
