"""Quantum circuits: the public name of `lockstep.systems.quantum`, the very same module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lockstep.systems import quantum

if TYPE_CHECKING:  # for the reference and for editors, which import nothing
    from lockstep.systems.quantum import *  # noqa: F403

sys.modules[__name__] = quantum
