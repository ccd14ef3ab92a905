"""The model's parameters as views of one flat tensor for each dtype.

A flat tensor is exchanged, stepped, hashed and saved in one piece; the module sees its own
parameters as always. Offsets depend on the model and the optimizer's groups only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.parallel.arena import BLOCK, Segment
from lockstep.parallel.layout import Range

_ALIGN = 16
"""Elements. Tensors start on a cache line, and no group ends inside a vector register."""

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Entry:
    """One tensor's place: `shape` elements from `offset` of segment `segment`."""

    name: str
    segment: int
    group: int
    offset: int
    shape: torch.Size

    @property
    def range(self) -> Range:
        """The elements of the segment it occupies."""
        return Range(self.offset, self.offset + self.shape.numel())


@dataclass(frozen=True)
class Piece:
    """The elements of a segment that belong to one optimizer group, padding included."""

    segment: int
    group: int
    range: Range


class FlatTensors:
    """Tensors moved into flat memory, of which they become views.

    Attributes:
        tensors: tensors in flat order, as views of the flat ones.
        entries: place of each of them in flat memory.
        segments: size and dtype of each flat tensor.
        flats: flat tensors, one for each segment, of one dimension.
        pieces: ranges of flat memory that each optimizer group takes.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[str, Tensor]]], what: str) -> None:
        """Move all tensors of `groups`, lists of (name, tensor).

        Raises:
            TaskError: a tensor's dtype is neither float32 nor float64.
        """
        self.tensors: list[Tensor] = []
        self.entries: list[Entry] = []
        self.segments: list[Segment] = []
        self.pieces: list[Piece] = []
        for group in groups:
            for name, tensor in group:
                if tensor.dtype not in DTYPES:
                    raise TaskError(
                        f"{what} {name}: dtype is {tensor.dtype}, must be torch.float32 or "
                        "torch.float64 (for bf16 or fp16 compute set precision.dtype)"
                    )
        for dtype in DTYPES:
            self._place(groups, dtype)
        self.flats = [
            torch.zeros(s.numel, dtype=s.dtype, device=self._device()) for s in self.segments
        ]
        for tensor, entry in zip(self.tensors, self.entries, strict=True):
            view = self.view(self.flats, entry)
            view.copy_(tensor.detach())
            # By `data`, so that modules and optimizers keep the very objects they hold.
            tensor.data = view

    def take_back(self) -> None:
        """Make tensors views of the flats again that were given memory of their own since.

        That is what `p.data = …` does, as in `nn.utils.vector_to_parameters` and in optimizers.
        """
        for tensor, entry in zip(self.tensors, self.entries, strict=True):
            view = self.view(self.flats, entry)
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor.detach())
                tensor.data = view

    @property
    def places(self) -> list[list[tuple[int, torch.Size]]]:
        """For each segment, (offset, shape) of each tensor."""
        return [
            [(e.offset, e.shape) for e in self.entries if e.segment == s]
            for s in range(len(self.segments))
        ]

    @staticmethod
    def view(flats: Sequence[Tensor], entry: Entry) -> Tensor:
        """The tensor at `entry` in flats laid out as these."""
        return flats[entry.segment][entry.range.first : entry.range.last].view(entry.shape)

    def named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Name to view, for flats laid out as these."""
        return {e.name: self.view(flats, e) for e in self.entries}

    def _place(self, groups: Sequence[Sequence[tuple[str, Tensor]]], dtype: torch.dtype) -> None:
        segment = len(self.segments)
        offset = 0
        for index, group in enumerate(groups):
            first = offset
            for name, tensor in group:
                if tensor.dtype == dtype:
                    self.tensors.append(tensor)
                    self.entries.append(Entry(name, segment, index, offset, tensor.shape))
                    offset += -(-tensor.numel() // _ALIGN) * _ALIGN
            if offset > first:
                self.pieces.append(Piece(segment, index, Range(first, offset)))
        if self.entries and self.entries[-1].segment == segment:
            self.segments.append(Segment(dtype, max(1, -(-offset // BLOCK)) * BLOCK))

    def _device(self) -> torch.device:
        return self.tensors[0].device


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's name, dtype, shape and bytes."""
    sha = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    sha.update(_bytes(tensor))
    return sha.digest()


def model_digest(model: nn.Module, more: Mapping[str, Tensor] | None = None) -> str:
    """SHA-256 of all parameters, persistent buffers and `more` tensors, by sorted name."""
    sha = hashlib.sha256()
    for name, tensor in sorted((model.state_dict() | dict(more or {})).items()):
        sha.update(tensor_digest(name, tensor))
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
