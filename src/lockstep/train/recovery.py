"""After the loss of ranks: who is ahead, and whether the survivors hold all of the state."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.errors import RankFailure
from lockstep.train.progress import Progress
from lockstep.train.step import StepResult

_PREFIX = "val/"


@dataclass(frozen=True)
class Lead:
    """The state that all ranks are to have.

    Attributes:
        rank: the lowest one that has it.
        step: its committed steps.
        evaluated: the step of its newest evaluation.
        result: of its last step, if it has done one in this sitting.
        metrics: of the validation split.
        is_ahead: whether some ranks have committed one step less.
    """

    rank: int
    step: int
    evaluated: int
    result: StepResult | None
    metrics: dict[str, float]
    is_ahead: bool


def find_lead(transport: Transport, progress: Progress, result: StepResult | None) -> Lead:
    """Find out which rank has come furthest; a collective.

    A rank commits a step when the reduction is done, and the next reduction needs all ranks. So
    ranks differ by one step at most.
    """
    positions = transport.gather_json([progress.step, progress.evaluated])
    step, evaluated = max(positions)
    rank = positions.index([step, evaluated])
    assert all(step - theirs <= 1 for theirs, _ in positions)
    own = [result, progress.metrics] if transport.rank == rank else None
    values, metrics = transport.gather_json(own)[rank]
    return Lead(
        rank,
        step,
        evaluated,
        StepResult(*values) if values else None,
        {k.removeprefix(_PREFIX): v for k, v in metrics.items() if k.startswith(_PREFIX)},
        any(theirs < step for theirs, _ in positions),
    )


def check_state_survives(config: TrainConfig) -> None:
    """Make sure that a lost rank has not taken state with it that nobody else has.

    Raises:
        RankFailure: it has.
    """
    if config.optimizer.sharded:
        raise RankFailure(
            "a rank has died, and with it the only copy of its part of the optimizer's state "
            "(optimizer.sharded=True); resume from the newest checkpoint"
        )
