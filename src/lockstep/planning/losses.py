"""What checkpoints and lost ranks cost, on average, in a run of any length.

Losses come at random, each rank's independently of the others'. With the time between two of them
large against the time that one costs, the best interval of checkpoints is sqrt(2 C T), where C is
the time in which training stands still for a checkpoint and T the mean time between two losses
(J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.planning.facts import Facts
from lockstep.planning.layouts import Layout
from lockstep.planning.prediction import Prediction

_HOUR_S = 3600.0
IN_PLACE = ("mpi", "local")
"""Launchers under which the others go on when a rank is lost."""
REGROUP_S = 1.0
"""Seconds that survivors take to go on: more than docs/benchmarks/recovery.md has measured."""


@dataclass(frozen=True)
class Losses:
    """What a run loses.

    Attributes:
        interval_s: seconds between checkpoints, the best for starting again after each loss.
        interval_steps: the same in steps, at least 1.
        checkpoints: part of the time in which training stands still for checkpoints, as often as
            that.
        in_place: part of the time that losses cost where the others go on; None where they cannot.
        restarted: part of the time that they cost where all start again from the newest
            checkpoint; 1.0 where the run would not get on at all.
    """

    interval_s: float
    interval_steps: int
    checkpoints: float
    in_place: float | None
    restarted: float


def losses(facts: Facts, prediction: Prediction, hours_between: float) -> Losses:
    """What checkpoints and losses cost in a layout.

    Args:
        facts: what was measured.
        prediction: what a step costs.
        hours_between: mean hours between two losses of one rank.
    """
    between_s = hours_between * _HOUR_S / prediction.layout.num_ranks
    interval_s = max(math.sqrt(2 * facts.checkpoint_s * between_s), prediction.step_s)
    again_s = facts.start_s + interval_s / 2
    in_place = None
    if facts.launcher in IN_PLACE and _survives(prediction.layout, facts):
        in_place = min(1.0, (REGROUP_S + prediction.step_s / 2) / between_s)
    return Losses(
        interval_s=interval_s,
        interval_steps=max(1, round(interval_s / prediction.step_s)),
        checkpoints=facts.checkpoint_s / (interval_s + facts.checkpoint_s),
        in_place=in_place,
        restarted=min(1.0, again_s / between_s),
    )


def _survives(layout: Layout, facts: Facts) -> bool:
    """Whether all state is still there when one rank is gone."""
    return layout.num_replicas > 1 and (layout.sharding == "none" or facts.buddy)
