"""Sketched layers: randomised linear algebra in place of large matrix products.

    from lockstep.sketch import SKLinear, replace_layers, rsvd

The names are loaded from their modules when they are first used: importing this package alone loads
none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
        "Convert a trained run's dense layers to sketched ones, and say what it costs.",
        "lockstep.systems.sketched.cli",
        is_command=True,
    ),
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

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("RandomFeatureAttention",),
        "conv": ("SKConv2d",),
        "decompositions": ("CQRRPT", "RSVD", "cqrrpt", "rsvd"),
        "linear": ("SKLinear",),
        "products": ("SignKey", "packed_signs", "sign_matrix"),
        "tuner": ("Candidate", "Choice", "apply", "choose", "measure", "replace_layers"),
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
