"""Sketched layers: the public name of `lockstep.systems.sketched`, the very same module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lockstep.systems import sketched

if TYPE_CHECKING:  # for the reference and for editors, which import nothing
    from lockstep.systems.sketched import *  # noqa: F403

sys.modules[__name__] = sketched
