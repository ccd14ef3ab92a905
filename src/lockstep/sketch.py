"""Sketched layers: the public name of `lockstep.systems.sketched`, the very same module."""

import sys

from lockstep.systems import sketched

sys.modules[__name__] = sketched
