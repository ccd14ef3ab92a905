"""In which order a rank computes the forward and backward passes of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeVar

from lockstep.parallel.layout import Dealt, split

T = TypeVar("T")


class Pass(NamedTuple):
    """One pass of a stage over a microbatch."""

    kind: Literal["forward", "backward"]
    microbatch: int
    stage: int


@lru_cache(maxsize=16)
def one_forward_one_backward(
    microbatches: Dealt, place: int, num_places: int, interleave: int = 1
) -> tuple[Pass, ...]:
    """The passes of a rank, 1F1B (Narayanan et al. 2019; PipeDream-Flush: 2021, section 2.2).

    A rank has every `num_places`-th stage: one, or several that are interleaved (Narayanan et al.
    2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", also
    section 2.2). It begins with forward passes until the first backward pass can have arrived; then
    they alternate. With M microbatches on P places and V stages of each, places are idle for
    (P - 1)/(V M) of the time that they compute.

    Forward passes, and backward passes, of a stage come in the order of microbatches. Any number
    of microbatches is right: none waits for one that waits for it.

    Args:
        microbatches: microbatches of the replica.
        place: which of the ranks that share out the stages this is, from 0.
        num_places: number of these ranks.
        interleave: number of stages of each.
    """
    stages = range(place, num_places * interleave, num_places)
    groups = in_groups(range(*microbatches), num_places)
    forward = [Pass("forward", m, stage) for g in groups for stage in stages for m in g]
    backward = [Pass("backward", m, stage) for g in groups for stage in stages[::-1] for m in g]
    ahead = num_places - 1 - place
    if interleave > 1:
        ahead = 2 * ahead + (interleave - 1) * max(map(len, groups), default=0)
    alternating = zip_longest(forward[ahead:], backward)
    return (*forward[:ahead], *(one for pair in alternating for one in pair if one is not None))


def in_groups(items: Sequence[T], num_places: int) -> list[Sequence[T]]:
    """Items that a rank takes through one of its stages before it turns to the next one.

    As many in each as there are places, or somewhat more: fewer would leave places idle, and could
    have two of them wait for one another.
    """
    num_groups = max(1, len(items) // num_places)
    return [items[own.first : own.last] for own in split(len(items), num_groups)]
