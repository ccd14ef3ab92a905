"""The model's parameters as views of one flat tensor for each dtype.

A flat tensor is exchanged, stepped, hashed and saved in one piece; the module sees its own
parameters as always. Offsets depend on the model and the optimizer's groups only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.nn.cutting import Shard
from lockstep.nn.units import EVERYWHERE, Holding, Unit
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


class Part(NamedTuple):
    """The blocks of a segment that belong to one unit of the model.

    Attributes:
        segment: number of the segment.
        unit: unit; `EVERYWHERE` for tensors that every rank holds.
        num_blocks: number of blocks of `BLOCK` elements.
    """

    segment: int
    unit: Unit
    num_blocks: int


@dataclass(frozen=True)
class Piece:
    """The elements of a segment that belong to one optimizer group, padding included."""

    segment: int
    group: int
    range: Range


class FlatTensors:
    """Tensors moved into flat memory, of which they become views.

    Of a model in units a rank may hold some units only. The tensors of each unit are whole
    blocks, so that the norm of a block is the same whatever else a rank holds.

    Attributes:
        tensors: tensors in flat order, as views of the flat ones.
        entries: place of each of them in flat memory.
        segments: size and dtype of each flat tensor.
        flats: flat tensors, one for each segment, of one dimension.
        pieces: ranges of flat memory that each optimizer group takes.
        kinds: segment and optimizer group of the tensors, those that other ranks hold too.
        parts: blocks of each unit in the order of flat memory, those that other ranks hold too.
        names: name of each tensor by its id, of those that other ranks hold too.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[str, Tensor]]],
        what: str,
        shards: Mapping[str, Shard] | None = None,
        units: Mapping[str, Unit] | None = None,
        own: Holding | None = None,
    ) -> None:
        """Move tensors.

        Args:
            groups: lists of (name, tensor).
            what: what errors call a tensor.
            shards: what those tensors that are cut are parts of, by name.
            units: unit of each tensor that not every rank need hold, by name.
            own: blocks and shards to hold; None holds all.

        Raises:
            TaskError: a tensor's dtype is neither float32 nor float64.
        """
        self.tensors: list[Tensor] = []
        self.entries: list[Entry] = []
        self.segments: list[Segment] = []
        self.pieces: list[Piece] = []
        self.kinds: list[tuple[int, int]] = []
        self.parts: list[Part] = []
        self._groups, self._what, self._shards = groups, what, dict(shards or {})
        self._units = dict(units or {})
        self._own = own
        self.names = {id(tensor): name for group in groups for name, tensor in group}
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

    def restricted(self, own: Holding) -> FlatTensors:
        """The same tensors in new memory, of some units only; the others keep theirs."""
        return FlatTensors(self._groups, self._what, self._shards, self._units, own)

    @property
    def wholes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each whole tensor, by its name in the model's `state_dict`."""
        found = {}
        for group in self._groups:
            for name, tensor in group:
                shard = self._shards.get(name)
                place = (name, tensor.shape) if shard is None else (shard.whole, shard.shape)
                found[place[0]] = (place[1], tensor.dtype)
        return found

    @property
    def everyone(self) -> dict[str, Tensor]:
        """Name to tensor, of those that other ranks hold too, which here have a shape only."""
        return {name: tensor.detach() for group in self._groups for name, tensor in group}

    @property
    def shards(self) -> Mapping[str, Shard]:
        """What those tensors that are cut are parts of, by name."""
        return self._shards

    @property
    def units(self) -> Mapping[str, Unit]:
        """The unit of each tensor that not every rank need hold, by name."""
        return self._units

    def segments_of(self, own: Holding) -> list[Segment]:
        """Size and dtype of each flat tensor of a rank that holds `own`."""
        segments = []
        for number, (dtype, _) in enumerate(self.segments):
            blocks = [p.num_blocks for p in self.parts if p.segment == number and own.has(p.unit)]
            segments.append(Segment(dtype, max(1, sum(blocks)) * BLOCK))
        return segments

    def holds(self, unit: Unit) -> bool:
        """Whether the tensors of a unit are held here."""
        return self._own is None or self._own.has(unit)

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
        if not any(tensor.dtype == dtype for group in groups for _, tensor in group):
            return
        segment = len(self.segments)
        offset = 0
        for index, group in enumerate(groups):
            first = offset
            if any(tensor.dtype == dtype for _, tensor in group):
                self.kinds.append((segment, index))
            for unit in sorted({EVERYWHERE, *self._units.values()}):
                named = [(n, t) for n, t in group if t.dtype == dtype and self._unit(n) == unit]
                offset = self._place_part(named, segment, index, unit, offset)
            if offset > first:
                self.pieces.append(Piece(segment, index, Range(first, offset)))
        numel = max(1, -(-offset // BLOCK)) * BLOCK
        if not self._units:
            self.parts.append(Part(segment, EVERYWHERE, numel // BLOCK))
        self.segments.append(Segment(dtype, numel))

    def _place_part(
        self,
        named: Sequence[tuple[str, Tensor]],
        segment: int,
        group: int,
        unit: Unit,
        first: int,
    ) -> int:
        """Place a group's tensors of one unit behind what is there: where the next ones begin."""
        offset = first
        for name, tensor in named:
            if self.holds(unit):
                self.tensors.append(tensor)
                self.entries.append(Entry(name, segment, group, offset, tensor.shape))
            offset += -(-tensor.numel() // _ALIGN) * _ALIGN
        if self._units and named:
            num_blocks = -(-(offset - first) // BLOCK)
            self.parts.append(Part(segment, unit, num_blocks))
            offset = first + num_blocks * BLOCK
        return offset if self.holds(unit) else first

    def _unit(self, name: str) -> Unit:
        return self._units.get(name, EVERYWHERE)

    def _device(self) -> torch.device:
        return next(tensor.device for group in self._groups for _, tensor in group)


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's name, dtype, shape and bytes."""
    sha = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    sha.update(_bytes(tensor))
    return sha.digest()


def model_digest(model: nn.Module, more: Mapping[str, Tensor] | None = None) -> str:
    """SHA-256 of all parameters, persistent buffers and `more` tensors, by sorted name."""
    return tensors_digest(model.state_dict() | dict(more or {}))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all tensors by sorted name."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(tensor_digest(name, tensor))
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
