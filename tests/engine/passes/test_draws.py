"""What a loss draws from global generators depends on the step and the microbatch alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.data.random import Stream, random_key
from lockstep.engine.passes.compute import Compute

SEED = 5


def of_python(key: int) -> float:
    return random.Random(key).gauss(0.0, 1.0)


def of_numpy(key: int) -> float:
    return float(np.random.RandomState(key & 0xFFFFFFFF).standard_normal())


def of_torch(key: int) -> float:
    return torch.randn((), generator=torch.Generator().manual_seed(key)).item()


def looked_ahead() -> float:
    """Draws, and leaves the generator as it was."""
    state = np.random.get_state()
    value = float(np.random.standard_normal())
    np.random.set_state(state)
    return value


DRAWS: list[tuple[Callable[[], float], Callable[[int], float]]] = [
    (lambda: random.gauss(0.0, 1.0), of_python),
    (lambda: float(np.random.standard_normal()), of_numpy),
    (looked_ahead, of_numpy),
    (lambda: torch.randn(()).item(), of_torch),
]


class Late(lockstep.Task):
    """Draws when it is told to."""

    draw: Callable[[], float] | None = None
    drawn = 0.0

    def build_model(self) -> nn.Module:
        """As small as can be."""
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> None:
        """Nothing is fetched here."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        """The sum of outputs."""
        if self.draw is not None:
            self.drawn = self.draw()
        return lockstep.Loss(model(batch).sum(), len(batch))


@pytest.mark.parametrize(("draw", "expected"), DRAWS)
def test_late_draws_are_those_of_the_microbatch(
    draw: Callable[[], float], expected: Callable[[int], float]
) -> None:
    task = Late(lockstep.TrainConfig(seed=SEED))
    compute = Compute(task, task.build_model(), task.config, torch.device("cpu"))
    for step, microbatch, draws in (
        (0, 0, False),
        (999, 1, False),
        (1000, 3, True),
        (1000, 4, True),
    ):
        task.draw = draw if draws else None
        compute.forward(step, microbatch, torch.ones(3, 2))
        if draws:
            key = random_key(SEED, Stream.FORWARD, step, microbatch)
            assert task.drawn == expected(key)
        # As another microbatch, or a hook, would leave them: the next one must not notice.
        random.gauss(0.0, 1.0), np.random.standard_normal(), torch.randn(3)
