"""Optimizers that torch does not have, or not without a closure.

    from lockstep.optim import AdamATan2

Names are loaded from their modules when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.lazy import lazy_names

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

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
