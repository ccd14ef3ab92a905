"""Gradients as messages of a fixed size: signs, and a few elements of each tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.parallel.compression.reduction import BLOCK
from lockstep.parallel.fold import Segment

_BYTE = 8


def pack(values: Tensor) -> Tensor:
    """A bit for each element that is not negative, the first one lowest in its byte.

    Args:
        values: [numel], a multiple of 8.

    Returns:
        uint8 [numel / 8].
    """
    bits = (values >= 0).view(-1, _BYTE).to(torch.uint8)
    return (bits << _places(values.device)).sum(dim=1, dtype=torch.uint8)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs: 1 for each bit that is set, -1 for the others; [8 x len(packed)]."""
    bits = (packed[:, None] >> _places(packed.device)) & 1
    return bits.view(-1).to(dtype).mul_(2).sub_(1)


def magnitudes(values: Tensor, counts: Tensor) -> Tensor:
    """The mean magnitude of each block.

    Args:
        values: [blocks x BLOCK], zero where a block is padded.
        counts: number of elements of each block that are not padding, [blocks]; at least 1.

    Returns:
        [blocks] of the dtype of `values`; NaN or infinite where an element is.
    """
    return values.view(-1, BLOCK).abs().sum(dim=1) / counts


def signed(packed: Tensor, magnitudes: Tensor) -> Tensor:
    """What `pack` and `magnitudes` have kept, [blocks x BLOCK]."""
    signs = unpack(packed, magnitudes.dtype).view(-1, BLOCK)
    return (signs * magnitudes[:, None]).view(-1)


def _places(device: torch.device) -> Tensor:
    return torch.arange(_BYTE, dtype=torch.uint8, device=device)


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


WORD = 8
"""Bytes: parts of a message begin at multiples, so that each can be viewed as any dtype."""


class Code(ABC):
    """Writes and reads one segment of a leaf.

    Attributes:
        num_bytes: size of a message, a multiple of `WORD`.
    """

    num_bytes: int

    @abstractmethod
    def write(self, leaf: Tensor, message: Tensor) -> Tensor:
        """Write a leaf into a message.

        Args:
            leaf: [numel].
            message: uint8 [num_bytes].

        Returns:
            What a reader makes of it, [numel].
        """

    @abstractmethod
    def add(self, message: Tensor, total: Tensor) -> None:
        """Add what a message says to a sum, [numel]."""


class GreatestCode(Code):
    """The elements of each tensor with the greatest magnitudes, and their indices (top-k)."""

    def __init__(
        self, segment: Segment, specs: Sequence[tuple[int, torch.Size]], ratio: float
    ) -> None:
        """Count.

        Args:
            segment: dtype and number of elements of the leaf.
            specs: offset and shape of each of its tensors.
            ratio: part of each tensor's elements to send.
        """
        self._tensors = [(offset, shape.numel(), num_kept(shape, ratio)) for offset, shape in specs]
        count = sum(kept for _, _, kept in self._tensors)
        self._dtype = segment.dtype
        self._index = torch.int32 if segment.numel < 2**31 else torch.int64
        self._values = slice(0, count * segment.dtype.itemsize)
        first = _words(self._values.stop)
        self._indices = slice(first, first + count * self._index.itemsize)
        self.num_bytes = _length(self._indices.stop)

    def write(self, leaf: Tensor, message: Tensor) -> Tensor:
        """See `Code.write`."""
        found = [
            greatest(leaf[offset : offset + numel], count) + offset
            for offset, numel, count in self._tensors
            if count
        ]
        indices = torch.cat(found) if found else leaf.new_empty(0, dtype=torch.int64)
        values = leaf[indices]
        message[self._values].view(self._dtype).copy_(values)
        message[self._indices].view(self._index).copy_(indices)
        return torch.zeros_like(leaf).index_copy_(0, indices, values)

    def add(self, message: Tensor, total: Tensor) -> None:
        """See `Code.add`."""
        # No index comes twice in a message, so nothing depends on the order inside of it.
        indices = message[self._indices].view(self._index)
        total.index_add_(0, indices, message[self._values].view(self._dtype))


class SignCode(Code):
    """Signs, and the mean magnitude of each block (1-bit SGD: Seide et al. 2014).

    The mean is Bernstein et al.'s and Karimireddy et al.'s (2019), instead of one for each sign.
    """

    def __init__(self, segment: Segment, specs: Sequence[tuple[int, torch.Size]]) -> None:
        """Count.

        Args:
            segment: dtype and number of elements of a leaf in blocks.
            specs: offset and shape of each of its tensors.
        """
        ends = [offset + shape.numel() for offset, shape in specs]
        starts = [*(offset for offset, _ in specs), segment.numel]
        self._padding = [slice(end, start) for end, start in zip([0, *ends], starts, strict=True)]
        counts = torch.ones(segment.numel, dtype=segment.dtype)
        for part in self._padding:
            counts[part] = 0
        # A block may be padding as a whole.
        self._counts = counts.view(-1, BLOCK).sum(dim=1).clamp_(min=1)
        self._dtype = segment.dtype
        self._magnitudes = slice(0, len(self._counts) * segment.dtype.itemsize)
        first = _words(self._magnitudes.stop)
        self._bits = slice(first, first + segment.numel // 8)
        self.num_bytes = _length(self._bits.stop)

    def write(self, leaf: Tensor, message: Tensor) -> Tensor:
        """See `Code.write`."""
        self._counts = self._counts.to(leaf.device)
        message[self._magnitudes].view(self._dtype).copy_(magnitudes(leaf, self._counts))
        message[self._bits].copy_(pack(leaf))
        return self._read(message)

    def add(self, message: Tensor, total: Tensor) -> None:
        """See `Code.add`."""
        total.add_(self._read(message))

    def _read(self, message: Tensor) -> Tensor:
        values = signed(message[self._bits], message[self._magnitudes].view(self._dtype))
        for part in self._padding:
            values[part] = 0
        return values


def _words(num_bytes: int) -> int:
    return -(-num_bytes // WORD) * WORD


def _length(num_bytes: int) -> int:
    """Of a message; not 0, or it would begin at any byte, and could not be seen as numbers."""
    return max(_words(num_bytes), WORD)
