"""Sketched layers: randomised linear algebra in place of large matrix products.

    from lockstep.sketch import SKLinear, replace_layers, rsvd

The names are loaded from their modules when they are first used: importing this package alone loads
none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config import lazy_names
from lockstep.launching.systems import CommandGroup, System

if TYPE_CHECKING:
    from lockstep.systems.sketched.attention import RandomFeatureAttention
    from lockstep.systems.sketched.conv import SKConv2d
    from lockstep.systems.sketched.decompositions import CQRRPT, RSVD, cqrrpt, rsvd
    from lockstep.systems.sketched.linear import SKLinear
    from lockstep.systems.sketched.products import SignKey, packed_signs, sign_matrix
    from lockstep.systems.sketched.tuner import (
        Candidate,
        Choice,
        apply,
        choose,
        measure,
        replace_layers,
    )

SYSTEM = System(
    "lockstep.systems.sketched.task:Sketched",
    "Handwritten digits with sketched layers: a perceptron or a transformer.",
    CommandGroup(
        "sketch",
        "Replace dense layers of a trained run by sketched ones.",
        "lockstep.systems.sketched.cli",
        is_command=True,
    ),
    originals="lockstep.systems.sketched.networks",
)

__all__ = [
    "CQRRPT",
    "RSVD",
    "Candidate",
    "Choice",
    "RandomFeatureAttention",
    "SKConv2d",
    "SKLinear",
    "SignKey",
    "apply",
    "choose",
    "cqrrpt",
    "measure",
    "packed_signs",
    "replace_layers",
    "rsvd",
    "sign_matrix",
]

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
