"""Random generators that a program holds itself, beside the global ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from lockstep.errors import TaskError

AnyGenerator: TypeAlias = (
    torch.Generator
    | np.random.Generator
    | np.random.BitGenerator
    | np.random.RandomState
    | random.Random
)
GENERATORS = (
    torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState,
    random.Random,
)  # fmt: skip
"""The classes of `AnyGenerator`."""


def is_global(value: object) -> bool:
    """Whether it is one of the generators that the engine sets for each microbatch."""
    own = (torch.default_generator, random._inst, np.random.mtrand._rand)
    return any(value is generator for generator in own)


def generator_state(generator: AnyGenerator) -> object:
    """A value that changes with each number drawn; can be compared, and shown by `repr`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        generator = generator._bit_generator
    elif isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    return _comparable(generator.state)


def _comparable(state: object) -> object:
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, Mapping):
        return {key: _comparable(value) for key, value in state.items()}
    return state


class IdleGenerators:
    """Generators that the first microbatch did not draw from, to be watched from then on."""

    def __init__(self, generators: Mapping[str, AnyGenerator]) -> None:
        """Watch generators, by what they are called."""
        self._generators = dict(generators)
        self.mark()

    def mark(self) -> None:
        """Take the present states as the expected ones: they are the same on all ranks."""
        self._states = {path: generator_state(g) for path, g in self._generators.items()}

    def check(self) -> None:
        """Make sure that nothing has been drawn from them.

        Raises:
            TaskError: naming the first generator that was drawn from.
        """
        for path, generator in self._generators.items():
            if generator_state(generator) != self._states[path]:
                raise TaskError(
                    f"{path}: a random generator that is held between microbatches was drawn from; "
                    "what it gives depends on how many of them this rank computes. Draw from the "
                    "global generators or from lockstep.generator(), which are set for each "
                    f"microbatch; if no result depends on it, set `scratch = ({path!r},)` in the "
                    "task's class"
                )
