"""Models that reason in segments, on small grids: hierarchical and recursive ones.

    from lockstep.systems.hrm.reasoning import HierarchicalModel, Sizes

They are plain modules and functions of tensors, and know nothing of ranks. Names are loaded from
their modules when they are first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "frame": ("ReasoningModel", "Sizes", "State"),
        "halting": (
            "IGNORED",
            "accuracy",
            "continue_target",
            "draw_min_steps",
            "exact",
            "halting_loss",
            "halts",
            "refill",
            "softmax_cross_entropy",
            "stablemax_cross_entropy",
        ),
        "models": ("HierarchicalModel", "RecursiveModel"),
    }
)
"""The public names of each module, for `__getattr__`; the imports above are for type checkers."""

_MODULES = MappingProxyType({name: module for module, names in _NAMES.items() for name in names})


if not TYPE_CHECKING:  # for type checkers, a module with this function has every name

    def __getattr__(name: str) -> Any:
        """A public name, from its module (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
