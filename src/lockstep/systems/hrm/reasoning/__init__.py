"""Models that reason in segments, on small grids: hierarchical and recursive ones.

    from lockstep.systems.hrm.reasoning import HierarchicalModel, Sizes

They are plain modules and functions of tensors, and know nothing of ranks. Names are loaded from
their modules when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.systems.hrm.reasoning.frame import ReasoningModel, Sizes, State
    from lockstep.systems.hrm.reasoning.halting import (
        IGNORED,
        accuracy,
        continue_target,
        draw_min_steps,
        exact,
        halting_loss,
        halts,
        refill,
        softmax_cross_entropy,
        stablemax_cross_entropy,
    )
    from lockstep.systems.hrm.reasoning.models import HierarchicalModel, RecursiveModel

__all__ = [
    "IGNORED",
    "HierarchicalModel",
    "ReasoningModel",
    "RecursiveModel",
    "Sizes",
    "State",
    "accuracy",
    "continue_target",
    "draw_min_steps",
    "exact",
    "halting_loss",
    "halts",
    "refill",
    "softmax_cross_entropy",
    "stablemax_cross_entropy",
]

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
