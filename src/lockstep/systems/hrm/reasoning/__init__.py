"""Models that reason in segments, on small grids: hierarchical and recursive ones.

    from lockstep.systems.hrm.reasoning import HierarchicalModel, Sizes

They are plain modules and functions of tensors, and know nothing of ranks.
"""

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
from lockstep.systems.hrm.reasoning.models import (
    HierarchicalModel,
    ReasoningModel,
    RecursiveModel,
    Sizes,
    State,
)

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
