"""Quantum circuits: the public name of `lockstep.systems.quantum`, the very same module."""

import sys

from lockstep.systems import quantum

sys.modules[__name__] = quantum
