"""Quantum circuits: the public name of `lockstep.systems.quantum`, the very same module."""

import sys
from typing import TYPE_CHECKING

from lockstep.systems import quantum

if TYPE_CHECKING:  # type checkers do not see the assignment below
    from lockstep.systems.quantum import *  # noqa: F403

sys.modules[__name__] = quantum
