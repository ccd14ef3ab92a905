"""The carries of all microbatches, distributed over ranks, with a copy of each on another rank.

A rank sends the next one copies of what its microbatches carry before any rank goes on from it. So
there is no moment at which the newest state is on one rank only, and the loss of a rank loses none
of it. Ranks that compute a microbatch together all have what it carries, and need no copies.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key
from lockstep.engine.carry import (
    Carries,
    Carry,
    CarryByNumber,
    exchanged,
    from_named,
    indexed,
    num_words,
    pack,
    unpack,
)
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.share import Held, Scattered
from lockstep.engine.checkpoint.tensor_files import Kind
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.optimizer_state import DTYPES
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import Runtime
from lockstep.parallel.compression.sums import error_segments
from lockstep.parallel.fold import Segment
from lockstep.parallel.layout import Assigned

_ERROR, _AGREED = "error", "agreed"


def distributed_carries(
    runtime: Runtime,
    config: TrainConfig,
    placement: Placement,
    flat: FlatTensors,
    first_agreed: Sequence[Tensor],
    has_task: bool,
) -> tuple[DistributedCarries | None, CompressedCarries | None]:
    """The carries of microbatches, if there are any, and the state of compression, if it is on.

    The arguments are those of `CompressedCarries`.
    """
    if config.compression.name == "none":
        return DistributedCarries(runtime, config, placement) if has_task else None, None
    compressed = CompressedCarries(runtime, config, placement, flat, first_agreed, has_task)
    return compressed if compressed.num_carries else None, compressed


class DistributedCarries(Carries):
    """The carries of this rank's microbatches, and copies of those of the rank before it.

    Where a microbatch has several, the second one of microbatch m has the number M + m, and so on,
    with M microbatches in all. Shared ones come last; they belong to no microbatch, and all ranks
    have them.

    Attributes:
        num_carries: number of all carries.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        placement: Placement,
        num_of_each: int = 1,
        num_shared: int = 0,
    ) -> None:
        super().__init__()
        num_distributed = num_of_each * config.num_microbatches
        self.num_carries = num_distributed + num_shared
        self._distributed = range(num_distributed)
        self._shared = range(num_distributed, self.num_carries)
        self._runtime = runtime
        self._config = config
        self._placement = placement
        # Copies of the rank before, packed: nobody waits for a device to see what is in them.
        self._arrived: Tensor | None = None
        self._copies: Tensor | None = None

    @property
    def committed(self) -> Mapping[int, Carry | None]:
        """See `Carries.committed`; with the copies of those of the rank before this one."""
        if self._copies is not None:
            self._committed |= unpack(self._copies)
            self._copies = None
        return self._committed

    def begin(self) -> None:
        """See `Carries.begin`."""
        super().begin()
        self._arrived = None

    def commit(self) -> None:
        """See `Carries.commit`."""
        super().commit()
        if self._arrived is not None:
            self._copies, self._arrived = self._arrived, None

    def skip(self) -> None:
        """See `Carries.skip`."""
        if self._arrived is not None:
            self.pending |= unpack(self._arrived)
        self._committed = dict(self.committed)
        super().skip()

    def replace(self, carries: CarryByNumber) -> None:
        """See `Carries.replace`."""
        super().replace(carries)
        self._copies = None

    @property
    def are_copied(self) -> bool:
        """Whether each rank has copies of those of the rank before it."""
        can_regroup = self._runtime.transport.can_regroup and self._placement.world.size > 1
        return self._config.carry.buddy and can_regroup and not self._placement.is_split

    @property
    def copy_length(self) -> int:
        """Number of elements that `send_copies` sends."""
        return num_words(self._own_pending) if self.are_copied else 0

    @property
    def _own_pending(self) -> dict[int, Carry | None]:
        return {
            number: carry for number, carry in self.pending.items() if number in self._distributed
        }

    def send_copies(self, step: int, lengths: Sequence[int]) -> None:
        """Send what this step has computed to the next rank; a collective.

        Args:
            step: number of the step, for faults.
            lengths: `copy_length` of each rank.

        Raises:
            GroupBroken: on all ranks, none of which then goes on from this step.
        """
        if not self.are_copied:
            return
        world = self._placement.world
        rank, size = world.rank, world.size
        self._runtime.at("copy", step)
        sent, counts = [0] * size, [0] * size
        sent[(rank + 1) % size], counts[rank - 1] = lengths[rank], lengths[rank - 1]
        received = torch.empty(lengths[rank - 1], dtype=torch.int64, device=self._runtime.device)
        packed = pack(self._own_pending, self._runtime.device)
        with self._placement.in_stream(waits=True):
            world.all_to_all(packed, sent, [0] * size, received, counts)
        self._arrived = received
        world.agree()
        self._runtime.at("copied", step)

    def settle(self, norm: float) -> None:
        """Commit what the step has computed, or skip it, as its optimizer does; not a collective.

        Args:
            norm: norm of the step's gradient; not finite if fp16 skips the step.
        """
        if math.isfinite(norm):
            for number in self._shared:
                # A rank that follows others without the sums lacks them, and gets them later.
                if number not in self.pending:
                    self._committed.pop(number, None)
            self.commit()
        else:
            self.skip()

    def wanted(self, ranges: Sequence[Assigned]) -> set[int]:
        """The numbers of the carries that this rank needs, with those it has copies of.

        Args:
            ranges: microbatches of each rank.
        """
        rank, num = self._placement.world.rank, self._config.num_microbatches
        owners = [rank, rank - 1] if self.are_copied else [rank]
        return {
            first + number
            for owner in owners
            for number in range(*ranges[owner])
            if number < num
            for first in range(0, len(self._distributed), num)
        } | {*self._shared}

    def redistribute(self, ranges: Sequence[Assigned]) -> list[int]:
        """Bring carries to the ranks that are to compute their microbatches; a collective.

        Args:
            ranges: microbatches of each rank.

        Returns:
            The numbers of the carries that no rank has, the same on all ranks. If there are any,
            nothing has changed.

        Raises:
            GroupBroken: on all ranks; nothing has changed.
        """
        world, own = self._placement.world, self.wanted(ranges)
        arrived, lost = exchanged(world, self.committed, own, self._runtime.device)
        world.agree()
        if not lost:
            self.replace(arrived)
        return lost

    def check(self, tensors: Mapping[str, Tensor], structures: Mapping[str, Any]) -> None:
        """Refuse carries that this run's microbatches cannot have.

        Args:
            tensors: tensors by "number/name".
            structures: what each carry is made of, by number.

        Raises:
            ValueError: says what is wrong.
        """

    def digest(self) -> str:
        """SHA-256 of the carries of all microbatches; a collective."""
        known: dict[str, str] = {}
        for theirs in self._placement.world.gather_json(self.digests()):
            known |= theirs
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def restore(
        self, saved: Snapshot | None, is_everywhere: bool, microbatches: Sequence[Assigned]
    ) -> None:
        """Bring carries of a checkpoint to the ranks that compute their microbatches; a collective.

        Args:
            saved: the checkpoint, on ranks that have read it: all, or rank 0.
            is_everywhere: whether all have.
            microbatches: those of each rank.
        """
        wanted = sorted(self.wanted(microbatches)) if is_everywhere else [*range(self.num_carries)]
        found: CarryByNumber = {}
        if saved is not None:
            found = from_named(saved.carry, saved.meta["carry"], wanted, self._runtime.device)
        # If rank 0 alone has read them, `redistribute` sends them on.
        self.replace(found)
        self.redistribute(microbatches)

    def scattered(self) -> tuple[dict[str, Scattered], dict[str, Any]]:
        """All carries, for a checkpoint; see `scattered_carries`."""
        return scattered_carries(self._placement.world, self.committed)


class CompressedCarries(DistributedCarries):
    """Carries of the task, if it has any, followed by the state of compression (`LeafStates`).

    The compression error of a microbatch is a carry of it; what all ranks agree on is a shared one.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        placement: Placement,
        flat: FlatTensors,
        first_agreed: Sequence[Tensor],
        has_task: bool,
    ) -> None:
        """Begin with nothing.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            placement: where each rank is on the mesh.
            flat: trainable parameters in flat memory.
            first_agreed: `agreed` of the first step; nothing if ranks need not agree.
            has_task: whether the task has a carry.
        """
        self._name, feeds_back = config.compression.name, config.compression.error_feedback
        super().__init__(
            runtime, config, placement, int(has_task) + int(feeds_back), int(bool(first_agreed))
        )
        self._first = config.num_microbatches * int(has_task)
        self._copies_errors = config.compression.buddy or not feeds_back
        self._initial = list(first_agreed)
        errors: list[Segment] = []
        if feeds_back:
            errors = error_segments(self._name, flat.segments, flat.specs)
        self._errors = {f"{_ERROR}_{n}": (s.dtype, [s.numel]) for n, s in enumerate(errors)}
        self._agreed = {
            f"{_AGREED}_{n}": (there.dtype, [*there.shape]) for n, there in enumerate(first_agreed)
        }

    @property
    def are_copied(self) -> bool:
        """Whether each rank has copies of those of the rank before it."""
        # For each microbatch, a copy of its error is as large as a gradient.
        return self._copies_errors and super().are_copied

    @property
    def key(self) -> int:
        """Random key of the present step."""
        return random_key(self._config.seed, Stream.COMPRESSION, self._placement.step)

    @property
    def agreed(self) -> Sequence[Tensor]:
        """See `LeafStates`."""
        carry = self.of(self._shared.start)
        return self._initial if carry is None else [carry.tensors[name] for name in self._agreed]

    def agree(self, tensors: Sequence[Tensor]) -> None:
        """See `LeafStates`."""
        self._make(self._shared.start, self._agreed, tensors)

    def of_leaf(self, microbatch: int) -> Sequence[Tensor]:
        """See `LeafStates`."""
        carry = self.of(self._first + microbatch) if self._errors else None
        return [] if carry is None else [carry.tensors[name] for name in self._errors]

    def make_leaf(self, microbatch: int, errors: Sequence[Tensor]) -> None:
        """See `LeafStates`."""
        self._make(self._first + microbatch, self._errors, errors)

    def _make(self, number: int, names: Mapping[str, object], tensors: Sequence[Tensor]) -> None:
        named = dict(zip(names, tensors, strict=True))
        self.make(number, Carry(_structure(named), named))

    def check(self, tensors: Mapping[str, Tensor], structures: Mapping[str, Any]) -> None:
        """See `DistributedCarries.check`."""
        for number in range(self._first, self.num_carries):
            shapes = self._agreed if number in self._shared else self._errors
            if structures[str(number)] != _structure(shapes):
                raise ValueError(f"{number}: is not a state of compression.name={self._name}")
            for name, (dtype, shape) in shapes.items():
                there = tensors[f"{number}/{name}"]
                if there.dtype != dtype or [*there.shape] != shape:
                    raise ValueError(
                        f"{number}/{name}: is {there.dtype} {list(there.shape)}, must be {dtype} "
                        f"{shape}"
                    )

    def _describe(self, number: int) -> str:
        if number in self._shared:
            return "what compression has agreed on"
        if number < self._first:
            return super()._describe(number)
        return f"what compression keeps of microbatch {number - self._first}"


def _structure(names: Mapping[str, object]) -> dict[str, Any]:
    return {"dict": {name: {"tensor": name} for name in names}}


def scattered_carries(
    transport: Transport, carries: CarryByNumber
) -> tuple[dict[str, Scattered], dict[str, Any]]:
    """The carries that some rank has; a collective.

    Args:
        transport: the group of ranks.
        carries: the carries of this rank.

    Returns:
        Their tensors by "number/name", and the structure of each by its number.
    """
    owners: dict[int, int] = {}
    for rank, numbers in enumerate(transport.gather_json(sorted(carries))):
        owners = dict.fromkeys(numbers, rank) | owners
    mine = {n: carry for n, carry in carries.items() if owners[n] == transport.rank}
    tensors: dict[str, Scattered] = {}
    structures: dict[str, Any] = {}
    for rank, of_rank in enumerate(transport.gather_json(indexed(mine))):
        for number, described in of_rank:
            structures[str(number)] = described and described[0]
            own = mine.get(number)
            for name, dtype, shape in described[1] if described else ():
                kind = Kind(DTYPES[dtype], torch.Size(shape))
                tensor = own.tensors[name] if own is not None else None
                tensors[f"{number}/{name}"] = Held(kind, rank, tensor)
    return tensors, {number: structures[number] for number in sorted(structures, key=int)}
