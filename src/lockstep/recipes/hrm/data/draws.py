"""Random generators keyed by what they are for, so that no draw depends on another one's number."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from lockstep.errors import ConfigError


class Use(IntEnum):
    """What random numbers are for."""

    TRAIN = 1
    TEST = 2
    AUGMENT = 3
    SPLIT = 4
    CHOICE = 5
    TRANSLATE = 6


def keyed(seed: int, use: Use, number: int = 0) -> np.random.Generator:
    """The generator of the puzzle with a number, for one use.

    Philox (Salmon et al. 2011) is counter-based: generators of other keys share nothing.

    Raises:
        ConfigError: the seed is negative or has more than 63 bits.
    """
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed}: must be from 0 to 2^63 - 1")
    key = np.array([seed, use << 48 | number], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
