"""Random numbers of trajectories: a function of key, row, shot and place, and of nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import as_integer

_BLOCK = 4
"""Numbers that one value of Philox' counter makes."""


def uniform(key: int, row: int, first: int, shots: int, places: int) -> Tensor:
    """Uniform numbers in [0, 1), [shots, places], float64.

    Philox (Salmon et al. 2011) is counter-based: shot s has the numbers s·places … of the stream
    of its key and row, whichever shots are drawn together.

    Args:
        key: key of the numbers, from 0 to 2^64 less one.
        row: number of the row of parameters.
        first: number of the first shot.
        shots: number of shots.
        places: number of random numbers of a shot.
    """
    start = first * places
    # Of a list with large integers NumPy would make floats.
    words = np.array([key, row], dtype=np.uint64)
    bits = np.random.Philox(key=words, counter=[start // _BLOCK, 0, 0, 0])
    generator = np.random.Generator(bits)
    skipped = start % _BLOCK
    drawn = generator.random(skipped + shots * places)[skipped:]
    return torch.from_numpy(drawn).view(shots, places)


def checked_key(key: int | None) -> int:
    """The key, drawn from torch's global generator where there is none.

    Lockstep seeds this generator for each microbatch.

    Raises:
        ConfigError: it is not an integer from 0 to 2^64 less one.
    """
    if key is None:
        return int(torch.randint((1 << 63) - 1, ()))
    number = as_integer(key, "key")
    if not 0 <= number < 1 << 64:
        raise ConfigError(f"key={key}: must be from 0 to 2^64 less one")
    return number
