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
    from lockstep.optim.gradient_based import LBFGS, AdamATan2, NaturalGradient
    from lockstep.optim.gradient_free import SPSA, Perturbation, Rotosolve, Sweep
    from lockstep.optim.rows import RowAdagrad, RowAdam, RowOptimizer, RowSGD, RowSignSGD

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
        "AdamATan2": "gradient_based",
        "LBFGS": "gradient_based",
        "NaturalGradient": "gradient_based",
        "Perturbation": "gradient_free",
        "Rotosolve": "gradient_free",
        "RowAdagrad": "rows",
        "RowAdam": "rows",
        "RowOptimizer": "rows",
        "RowSGD": "rows",
        "RowSignSGD": "rows",
        "SPSA": "gradient_free",
        "Sweep": "gradient_free",
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
