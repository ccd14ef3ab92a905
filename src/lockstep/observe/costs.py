"""What a step costs: the events that tell it, what was predicted beside it, and both in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.engine.events import Event
from lockstep.observe import text


@dataclass(frozen=True)
class StepCost:
    """What a step costs.

    Attributes:
        step_s: seconds, without evaluations and checkpoints.
        peak_bytes: the most memory that a rank has; 0 if it is not known.

    Raises:
        ValueError: no step can cost that.
    """

    step_s: float
    peak_bytes: int

    def __post_init__(self) -> None:
        if not (0 < self.step_s < math.inf and self.peak_bytes >= 0):
            raise ValueError(
                f"step_s={self.step_s}, peak_bytes={self.peak_bytes}: must be a finite time above "
                "0, and no fewer than 0 bytes"
            )


@dataclass(frozen=True, kw_only=True)
class Predicted(Event):
    """Before a sitting begins: what a plan says that its steps will cost.

    Attributes:
        by: the plan; empty where it says nothing of this run, and the first reports count instead.
        cost: what it says; None if it says nothing of this layout.
        reason: why there is no cost.
    """

    by: str
    cost: StepCost | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
    """Before a sitting ends: what its steps have cost, beside what was predicted.

    Attributes:
        measured: the median time, and the greatest memory; None where there were too few reports.
        predicted: what was predicted; None where nothing can be said.
        by: what has predicted it: a plan, or the first reports; empty if nothing has.
        reason: why there is no prediction, or not the plan's.
    """

    measured: StepCost | None
    predicted: StepCost | None
    by: str = ""
    reason: str = ""


def step_time(cost: Measured | None) -> str:
    """`5.9 ms; 6.1 ms predicted by plan.json`; empty where nothing was measured."""
    if cost is None or cost.measured is None:
        return ""
    if cost.predicted is None:
        return f"{text.brief(cost.measured.step_s)}; no prediction: {cost.reason}"
    predicted = f"{text.brief(cost.predicted.step_s)} predicted by {cost.by}"
    return f"{text.brief(cost.measured.step_s)}; {predicted}"


def peak_memory(cost: Measured | None) -> str:
    """`210.0 MiB; 220.0 MiB predicted by plan.json`; empty where nothing was measured."""
    if cost is None or cost.measured is None or not cost.measured.peak_bytes:
        return ""
    measured = text.size(cost.measured.peak_bytes)
    if cost.predicted is None or not cost.predicted.peak_bytes:
        return measured
    return f"{measured}; {text.size(cost.predicted.peak_bytes)} predicted by {cost.by}"
