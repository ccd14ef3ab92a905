"""After the loss of ranks: who is ahead."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.comm.transport import Transport
from lockstep.train.progress import Progress
from lockstep.train.step import StepResult

_PREFIX = "val/"


@dataclass(frozen=True)
class Lead:
    """The state that all ranks are to have.

    Attributes:
        rank: the lowest one that has it.
        step: its committed steps, and one that it has applied.
        evaluated: the step of its newest evaluation.
        result: of its last one, if it has done one in this sitting.
        metrics: of the validation split.
        is_ahead: whether some ranks have committed one step less.
    """

    rank: int
    step: int
    evaluated: int
    result: StepResult | None
    metrics: dict[str, float]
    is_ahead: bool


def find_lead(
    transport: Transport,
    progress: Progress,
    result: StepResult | None,
    applied: StepResult | None,
) -> Lead:
    """Find out which rank has come furthest; a collective.

    A rank commits a step when the reduction is done, and the next reduction needs all ranks. So
    ranks differ by one step at most.

    Args:
        transport: the group of ranks.
        progress: of this rank.
        result: of its last step.
        applied: of the step after that, if it has been applied but not committed.
    """
    positions = transport.gather_json([progress.step + (applied is not None), progress.evaluated])
    step, evaluated = max(positions)
    rank = positions.index([step, evaluated])
    assert all(step - theirs <= 1 for theirs, _ in positions)
    own = [applied or result, progress.metrics] if transport.rank == rank else None
    values, metrics = transport.gather_json(own)[rank]
    return Lead(
        rank,
        step,
        evaluated,
        StepResult(*values) if values else None,
        {k.removeprefix(_PREFIX): v for k, v in metrics.items() if k.startswith(_PREFIX)},
        any(theirs < step for theirs, _ in positions),
    )
