"""In which order a stage computes the forward and backward passes of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from lockstep.parallel.layout import Dealt


class Pass(NamedTuple):
    """One pass of a stage over a microbatch."""

    kind: Literal["forward", "backward"]
    microbatch: int


def one_forward_one_backward(microbatches: Dealt, stage: int, num_stages: int) -> Iterator[Pass]:
    """The passes of a stage, 1F1B (Narayanan et al. 2019, PipeDream-Flush: 2021, section 2.2).

    A stage begins with as many forward passes as there are stages behind it, so it keeps the
    activations of at most `num_stages - stage` microbatches. Backward passes come in the order of
    microbatches, on every stage; with one stage, each follows its forward pass at once.

    Args:
        microbatches: microbatches of the replica.
        stage: number of the stage, from 0.
        num_stages: number of stages.
    """
    ahead = min(num_stages - 1 - stage, len(microbatches))
    numbers = range(*microbatches)
    for number in numbers[:ahead]:
        yield Pass("forward", number)
    for forward, backward in zip(numbers[ahead:], numbers, strict=False):
        yield Pass("forward", forward)
        yield Pass("backward", backward)
    for number in numbers[len(numbers) - ahead :]:
        yield Pass("backward", number)
