"""The model's parameters as views of one flat tensor for each dtype, its entries and its slices.

A flat tensor is exchanged, stepped, hashed and saved in one piece; the module sees its own
parameters as before. Offsets depend on the model and the optimizer's groups only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import TaskError
from lockstep.nn.cutting import Shard
from lockstep.nn.deferred import ParameterDraws
from lockstep.nn.holding import EVERYWHERE, WHOLE, Holding, Unit, is_released, release
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import Range, within


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


class Slice(NamedTuple):
    """Elements of a segment that a rank steps."""

    range: Range
    """Which elements."""
    parameters: Tensor
    """Their memory."""
    gradient: Tensor
    """Memory of their mean gradient."""

    def of(self, part: Range) -> Tensor:
        """The gradient of those elements of `part` that are among these."""
        first, last = self.range
        return self.gradient[max(part.first - first, 0) : max(min(part.last, last) - first, 0)]


def storages(slices: Sequence[Sequence[Slice]]) -> set[int]:
    """Addresses of the memory of parameters and gradients in slices."""
    tensors = [t for of_segment in slices for s in of_segment for t in (s.parameters, s.gradient)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


_ALIGN = 16
"""Elements. Tensors start on a cache line, and no group ends inside a vector register."""

DTYPES = (torch.float32, torch.float64)


class FlatTensors:
    """Tensors moved into flat memory, of which they become views.

    A rank may own some units of the model only. The tensors of each unit are whole blocks, so that
    the norm of a block does not depend on the other units of a rank.

    Attributes:
        tensors: tensors in flat order, as views of the flat ones.
        entries: place of each of them in flat memory.
        segments: size and dtype of each flat tensor.
        flats: flat tensors, one for each segment, of one dimension.
        pieces: ranges of flat memory that each optimizer group takes.
        kinds: dtype and optimizer group of the tensors, also of those on other ranks.
        parts: blocks of each unit, also of those on other ranks, in an order that does not depend
            on `by_block`.
        names: name of each tensor by its id, also of those on other ranks.
        shards: what those tensors that are cut are parts of, by name.
        units: unit of each tensor that not every rank need have, by name.
        blocks: for each segment, the block of a pipeline that it is of; `WHOLE` if it has all.
        draws: how to draw tensors that have no values yet, whose segments are closed; else None.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[str, Tensor]]],
        kind: str,
        shards: Mapping[str, Shard] | None = None,
        units: Mapping[str, Unit] | None = None,
        own: Holding | None = None,
        by_block: bool = False,
        draws: ParameterDraws | None = None,
    ) -> None:
        """Move tensors.

        Args:
            groups: lists of (name, tensor).
            kind: what a tensor is, for errors.
            shards: what those tensors that are cut are parts of, by name.
            units: unit of each tensor that not every rank need have, by name.
            own: blocks and shards to own; None for all.
            by_block: whether each block of a pipeline has segments of its own.
            draws: how to draw the tensors, if they have no values yet.

        Raises:
            TaskError: a tensor's dtype is neither float32 nor float64.
        """
        self.tensors: list[Tensor] = []
        self.entries: list[Entry] = []
        self.segments: list[Segment] = []
        self.pieces: list[Piece] = []
        self.kinds: list[tuple[torch.dtype, int]] = []
        self.blocks: list[int] = []
        self.parts: list[Part] = []
        self.shards: Mapping[str, Shard] = dict(shards or {})
        self.units: Mapping[str, Unit] = dict(units or {})
        self._groups, self._kind = groups, kind
        self._own, self._by_block, self.draws = own, by_block, draws
        self.names = {id(tensor): name for group in groups for name, tensor in group}
        for group in groups:
            for name, tensor in group:
                if tensor.dtype not in DTYPES:
                    raise TaskError(
                        f"{kind} {name}: dtype is {tensor.dtype}, must be torch.float32 or "
                        "torch.float64 (for bf16 or fp16 compute set precision.dtype)"
                    )
        for dtype in DTYPES:
            self._place(groups, dtype)
        # Looked up for each block in each pass, so not by a search through all tensors.
        self._by_segment: list[list[tuple[Tensor, Entry]]] = [[] for _ in self.segments]
        for tensor, entry in zip(self.tensors, self.entries, strict=True):
            self._by_segment[entry.segment].append((tensor, entry))
        self.flats: list[Tensor] = []
        # One at a time, so that the memory it replaces is freed before the next one is allocated.
        device = next((tensor.device for group in groups for _, tensor in group), None)
        for number, (dtype, numel) in enumerate(self.segments):
            self.flats.append(torch.zeros(numel, dtype=dtype, device=device))
            if draws is not None:
                self.close(number)
                continue
            for tensor, entry in self._by_segment[number]:
                view = self.view(self.flats, entry)
                view.copy_(tensor.detach())
                # By `data`, so that modules and optimizers keep the very objects they hold.
                tensor.data = view

    def restricted(self, own: Holding, by_block: bool | None = None) -> FlatTensors:
        """The same tensors in new memory, of some units only; the others keep their memory.

        `by_block` says whether each block then has segments of its own; None for as here.
        """
        return self._again(self.units, own, self._by_block if by_block is None else by_block)

    def moved(self, units: Mapping[str, Unit]) -> FlatTensors:
        """The same tensors in new memory, with other units; this object must not be used again."""
        self.flats.clear()  # so that the memory of each is free as soon as its tensors have left
        return self._again(units, self._own, self._by_block)

    def _again(self, units: Mapping[str, Unit], own: Holding | None, by_block: bool) -> FlatTensors:
        return FlatTensors(self._groups, self._kind, self.shards, units, own, by_block, self.draws)

    @property
    def wholes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each whole tensor, by its name in the model's `state_dict`."""
        found = {}
        for group in self._groups:
            for name, tensor in group:
                shard = self.shards.get(name)
                place = (name, tensor.shape) if shard is None else (shard.whole, shard.shape)
                found[place[0]] = (place[1], tensor.dtype)
        return found

    @property
    def everyone(self) -> dict[str, Tensor]:
        """All tensors by name; those of other ranks have only a shape here."""
        return {name: tensor.detach() for group in self._groups for name, tensor in group}

    def segments_of(self, own: Holding) -> list[Segment]:
        """Size and dtype of each flat tensor of a rank that owns these units."""
        segments = []
        for number, (dtype, _) in enumerate(self.segments):
            blocks = [p.num_blocks for p in self.parts if p.segment == number and own.has(p.unit)]
            segments.append(Segment(dtype, max(self._fewest, sum(blocks)) * BLOCK))
        return segments

    @property
    def _fewest(self) -> int:
        """Number of blocks of a segment without tensors of this rank."""
        return 0 if self._by_block else 1

    def holds(self, unit: Unit) -> bool:
        """Whether this rank owns the tensors of a unit."""
        return self._own is None or self._own.has(unit)

    def renew(self) -> None:
        """Move tensors to memory without other references, so that `close` can free it."""
        if self.draws is not None:
            return  # it has none
        for segment, flat in enumerate(self.flats):
            self.flats[segment] = flat.clone()
            for tensor, entry in self._by_segment[segment]:
                tensor.data = self.view(self.flats, entry)

    def open(self, segment: int) -> None:
        """Allocate a segment, with undefined content, and make its tensors views of it."""
        flat = self.flats[segment]
        # The same storage as before, since autograd's saved tensors refer to it.
        flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
        for tensor, entry in self._by_segment[segment]:
            tensor.data = self.view(self.flats, entry)

    def draw(self, segment: int) -> None:
        """`open` a segment, and draw its tensors."""
        assert self.draws is not None, "they have values"
        self.open(segment)
        with torch.no_grad():
            self.flats[segment].zero_()
            for tensor, entry in self._by_segment[segment]:
                self.view(self.flats, entry).copy_(self.draws.make(tensor))

    def close(self, segment: int) -> None:
        """Free the memory of a segment; its tensors keep their shapes."""
        for tensor, _ in self._by_segment[segment]:
            release(tensor)
        storage = self.flats[segment].untyped_storage()
        if not storage.resizable():
            names = [entry.name for _, entry in self._by_segment[segment]]
            named = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise TaskError(
                f"a parameter of one block ({named}) was given to numpy, which keeps its memory "
                "from being freed (sharding=parameters): give it a copy (`.clone().numpy()`), or "
                "set sharding=gradients"
            )
        storage.resize_(0)

    def check_views(self, segment: int) -> None:
        """Make sure that the tensors of an open segment are views of it.

        Raises:
            TaskError: one was given memory of its own.
        """
        for tensor, entry in self._by_segment[segment]:
            if tensor.data_ptr() != self.view(self.flats, entry).data_ptr():
                raise TaskError(given_other_memory(entry.name))

    def tensors_of(self, segment: int) -> list[Tensor]:
        """The tensors of a segment."""
        return [tensor for tensor, _ in self._by_segment[segment]]

    def entries_of(self, segment: int) -> list[Entry]:
        """Places of the tensors of a segment."""
        return [entry for _, entry in self._by_segment[segment]]

    def fill(
        self, out: Tensor, segment: int, elements: Range, find: Callable[[str], Tensor | None]
    ) -> None:
        """Fill in elements of a segment from those of its tensors that can be found.

        Args:
            out: memory for the elements.
            segment: number of the segment.
            elements: which elements.
            find: gives the tensor of a name, on any device, if there is one.
        """
        for entry in self.entries_of(segment):
            common = entry.range.common(elements)
            tensor = find(entry.name) if len(common) else None
            if tensor is not None:
                part = tensor.reshape(-1)[within(common, entry.range)]
                out[within(common, elements)] = part.to(out.device)

    def take_gradients(self, segment: int) -> list[Tensor | None]:
        """The gradients of a segment's tensors, which then have none."""
        gradients = []
        for tensor, _ in self._by_segment[segment]:
            gradients.append(tensor.grad)
            tensor.grad = None
        return gradients

    def take_back(self) -> None:
        """Make tensors views of the flats again that were given memory of their own since.

        `p.data = …` does that, as in `nn.utils.vector_to_parameters` and in optimizers.

        Raises:
            TaskError: a tensor of a closed segment was given memory.
        """
        is_closed = [f.numel() > 0 == f.untyped_storage().nbytes() for f in self.flats]
        for tensor, entry in zip(self.tensors, self.entries, strict=True):
            if is_closed[entry.segment]:
                if not is_released(tensor):
                    raise TaskError(given_other_memory(entry.name))
                continue
            view = self.view(self.flats, entry)
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor.detach())
                tensor.data = view

    @property
    def specs(self) -> list[list[tuple[int, torch.Size]]]:
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
        of_dtype = [[(n, t) for n, t in group if t.dtype == dtype] for group in groups]
        homes = sorted(
            {self._home(self.units.get(n, EVERYWHERE)) for group in of_dtype for n, _ in group}
        )
        first_segment = len(self.segments)
        ends = [0] * len(homes)
        for index, group in enumerate(of_dtype):
            firsts = list(ends)
            if group:
                self.kinds.append((dtype, index))
            for unit in sorted({EVERYWHERE, *self.units.values()}):
                named = [(n, t) for n, t in group if self.units.get(n, EVERYWHERE) == unit]
                if named:
                    home = homes.index(self._home(unit))
                    segment = first_segment + home
                    ends[home] = self._place_part(named, segment, index, unit, ends[home])
            for home, (first, last) in enumerate(zip(firsts, ends, strict=True)):
                if last > first:
                    self.pieces.append(Piece(first_segment + home, index, Range(first, last)))
        for home, end in zip(homes, ends, strict=True):
            numel = max(self._fewest, -(-end // BLOCK)) * BLOCK
            if not self.units:
                self.parts.append(Part(len(self.segments), EVERYWHERE, numel // BLOCK))
            self.segments.append(Segment(dtype, numel))
            self.blocks.append(home)

    def _place_part(
        self,
        named: Sequence[tuple[str, Tensor]],
        segment: int,
        group: int,
        unit: Unit,
        first: int,
    ) -> int:
        """Place a group's tensors of one unit from `first` on; returns the next offset."""
        offset = first
        for name, tensor in named:
            if self.holds(unit):
                self.tensors.append(tensor)
                self.entries.append(Entry(name, segment, group, offset, tensor.shape))
            offset += -(-tensor.numel() // _ALIGN) * _ALIGN
        if self.units:
            num_blocks = -(-(offset - first) // BLOCK)
            self.parts.append(Part(segment, unit, num_blocks))
            offset = first + num_blocks * BLOCK
        return offset if self.holds(unit) else first

    def _home(self, unit: Unit) -> int:
        return unit.block if self._by_block else WHOLE


def given_other_memory(name: str) -> str:
    """The error message about a parameter whose memory a pass has replaced."""
    return (
        f"{name} was given other memory (`.data = …`) in a forward or backward pass, so it is no "
        "longer trained; compute a changed weight without storing it, or change it in place in "
        "Task.after_step(model, step)"
    )
