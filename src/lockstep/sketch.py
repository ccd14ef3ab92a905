"""Sketched layers: the public name of `lockstep.systems.sketched`, the very same module."""

import sys
from typing import TYPE_CHECKING

from lockstep.systems import sketched

if TYPE_CHECKING:  # type checkers do not see the assignment below
    from lockstep.systems.sketched import *  # noqa: F403

sys.modules[__name__] = sketched
