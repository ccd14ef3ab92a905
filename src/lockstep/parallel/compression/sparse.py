"""A few elements of each tensor: the greatest ones, or such as the seed draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SAMPLED = 64
"""One of so many elements is in a sample."""


def num_kept(shape: torch.Size, ratio: float) -> int:
    """How many elements of a tensor are kept: at least one, if it has any."""
    return math.ceil(ratio * shape.numel())


def greatest(values: Tensor, count: int) -> Tensor:
    """The indices of the greatest magnitudes, ascending; of equal ones the first are taken.

    What is not finite counts as greatest, so that it is never left out unseen.

    Args:
        values: [numel].
        count: how many, at most numel.

    Returns:
        int64 [count].
    """
    magnitudes = values.abs().nan_to_num_(nan=torch.inf)
    likely = _likely(magnitudes, count)
    among = magnitudes[likely]
    # Which of equal elements `topk` names is not said, and may differ between devices.
    least = torch.topk(among, count, sorted=False).values.amin()
    above, equal = among > least, among == least
    wanted = count - above.sum()
    return likely[above | (equal & (equal.cumsum(0) <= wanted))]


def _likely(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of all elements from some magnitude on, ascending; at least `count` of them.

    To look for the greatest of a few is three times faster. Where the bound is depends on a sample,
    but not what is found.
    """
    sample = magnitudes[::_SAMPLED]
    most = 2 * count // _SAMPLED + 8
    if most < len(sample):
        bound = torch.topk(sample, most, sorted=False).values.amin()
        found = (magnitudes >= bound).nonzero()[:, 0]
        if len(found) >= count:
            return found
    return torch.arange(len(magnitudes), device=magnitudes.device)


def drawn(shapes: Sequence[torch.Size], ratio: float, key: int) -> list[Tensor]:
    """Indices of elements of each tensor, ascending; all are as likely as any other.

    Args:
        shapes: shape of each tensor.
        ratio: part of the elements to draw.
        key: key of the random numbers, 63 bits.

    Returns:
        For each tensor int64 [num_kept].
    """
    generator = np.random.Generator(np.random.Philox(key=key))
    return [
        torch.from_numpy(
            np.sort(
                generator.choice(
                    shape.numel(), num_kept(shape, ratio), replace=False, shuffle=False
                )
            )
        )
        for shape in shapes
    ]
