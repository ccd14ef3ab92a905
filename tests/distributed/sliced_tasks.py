"""A pipeline whose gradients are summed in slices, however small they are."""

import sys
from pathlib import Path

from lockstep.parallel import reduction

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
import models

reduction.SMALL_BYTES = 0


class Sliced(models.Deep):
    """`Deep`."""
