"""Optimizers that torch does not have, or not without a closure.

    from lockstep.optim import AdamATan2

Names are loaded from their modules when they are first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.optim.adam_atan2 import AdamATan2
    from lockstep.optim.lbfgs import LBFGS
    from lockstep.optim.natural import NaturalGradient
    from lockstep.optim.rotosolve import Rotosolve, Sweep
    from lockstep.optim.rows import RowAdagrad, RowAdam, RowOptimizer, RowSGD, RowSignSGD
    from lockstep.optim.spsa import SPSA, Perturbation

__all__ = [
    "LBFGS",
    "SPSA",
    "AdamATan2",
    "NaturalGradient",
    "Perturbation",
    "Rotosolve",
    "RowAdagrad",
    "RowAdam",
    "RowOptimizer",
    "RowSGD",
    "RowSignSGD",
    "Sweep",
]

_HOMES: Mapping[str, str] = MappingProxyType(
    {
        "AdamATan2": "adam_atan2",
        "LBFGS": "lbfgs",
        "NaturalGradient": "natural",
        "Perturbation": "spsa",
        "Rotosolve": "rotosolve",
        "RowAdagrad": "rows",
        "RowAdam": "rows",
        "RowOptimizer": "rows",
        "RowSGD": "rows",
        "RowSignSGD": "rows",
        "SPSA": "spsa",
        "Sweep": "rotosolve",
    }
)


if not TYPE_CHECKING:  # else type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
