"""What a training step leaves behind, committed or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.engine.step.header import Header
from lockstep.engine.timing import Times


class StepResult(NamedTuple):
    """The result of a step, alike on all ranks."""

    scalars: list[float]
    """Loss and metrics of the global batch: [sum, weight, sum, weight, …]."""
    lr: float
    grad_norm: float
    stop_reason: str
    """Why the run should end now, the same on all ranks; empty if it should not."""
    times: list[Times]
    """For each rank, where its time had gone when it sent its header."""
    grows: bool
    """Whether a new process waits to be taken in, the same on all ranks."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StepResult:
        """The inverse of `_asdict`, after a journey as JSON."""
        return cls(**values | {"times": [Times(*times) for times in values["times"]]})


@dataclass
class Summed:
    """A step of a sharded optimizer whose gradient has been summed.

    Attributes:
        scalars: sums and weights of loss and metrics over the global batch.
        headers: header of each rank.
        result: result of the step, once this rank has applied it.
    """

    scalars: list[float]
    headers: list[Header]
    result: StepResult | None = None
