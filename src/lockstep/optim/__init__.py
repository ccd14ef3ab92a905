"""Optimizers that torch does not have, or not without a closure."""

from lockstep.optim.gradient_based import LBFGS, SAM, AdamATan2, NaturalGradient
from lockstep.optim.gradient_free import SPSA, Perturbation, Rotosolve, Sweep
from lockstep.optim.rows import RowAdagrad, RowAdam, RowOptimizer, RowSGD, RowSignSGD

__all__ = [
    "LBFGS",
    "SAM",
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
