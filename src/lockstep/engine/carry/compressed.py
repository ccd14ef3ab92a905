"""What compression keeps of microbatches, as one more carry of each.

So it moves with its microbatch, is saved, digested and copied as carries are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key
from lockstep.engine.carry.group import DealtCarries
from lockstep.engine.carry.tree import Carry
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.places import Places
from lockstep.engine.runtime import Runtime
from lockstep.parallel.compression.choice import INTEGERS, error_segments
from lockstep.parallel.compression.state import LeafState
from lockstep.parallel.layout import Dealt

_ERROR, _EXPONENTS = "error", "exponents"


class CompressedCarries(DealtCarries):
    """Carries of the task, if it has any, and behind them what compression keeps (`LeafStates`).

    Which exponents all ranks expect follows from the states of all microbatches. It comes with the
    sums of each step, and is asked for anew where microbatches are dealt out.

    Attributes:
        expected: see `LeafStates`.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        places: Places,
        flat: FlatTensors,
        first_exponents: Sequence[Tensor],
        has_task: bool,
    ) -> None:
        """Begin with nothing.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            places: place of each rank on the mesh.
            flat: trainable parameters in flat memory.
            first_exponents: what the first step expects; nothing unless leaves become integers.
            has_task: whether the task has a carry.
        """
        self._name, feeds_back = config.compression.name, config.compression.error_feedback
        has_state = feeds_back or self._name in INTEGERS
        super().__init__(runtime, config, places, int(has_task) + int(has_state))
        self._first = config.num_microbatches * int(has_task)
        self._copies_errors = config.compression.buddy or not feeds_back
        self._initial = list(first_exponents)
        self.expected: Sequence[Tensor] = self._initial
        self._next: Sequence[Tensor] = self._initial
        self._shapes: dict[str, tuple[torch.dtype, int]] = {}
        if feeds_back:
            segments = error_segments(self._name, flat.segments, flat.places)
            self._shapes |= {f"{_ERROR}_{n}": (s.dtype, s.numel) for n, s in enumerate(segments)}
        for number, there in enumerate(first_exponents):
            self._shapes[f"{_EXPONENTS}_{number}"] = (there.dtype, len(there))

    @property
    def are_copied(self) -> bool:
        """Whether each rank keeps those of the rank before it too."""
        # A copy of what is cut off is as large as a gradient, for each microbatch.
        return self._copies_errors and super().are_copied

    @property
    def key(self) -> int:
        """Random key of the present step."""
        return random_key(self._config.seed, Stream.COMPRESSION, self._places.step)

    def of_leaf(self, microbatch: int) -> LeafState | None:
        """See `LeafStates`."""
        carry = self.of(self._first + microbatch)
        if carry is None:
            return None
        parts = [
            [tensor for name, tensor in carry.tensors.items() if name.startswith(kind)]
            for kind in (_ERROR, _EXPONENTS)
        ]
        return LeafState(*parts)

    def make_leaf(self, microbatch: int, state: LeafState) -> None:
        """See `LeafStates`."""
        kinds = {_ERROR: state.errors, _EXPONENTS: state.exponents}
        tensors = {f"{kind}_{n}": t for kind, of in kinds.items() for n, t in enumerate(of)}
        self.make(self._first + microbatch, Carry(_structure(tensors), tensors))

    def expect(self, exponents: Sequence[Tensor]) -> None:
        """See `LeafStates`."""
        self._next = exponents

    def settle(self, norm: float) -> None:
        """See `DealtCarries.settle`."""
        super().settle(norm)
        if math.isfinite(norm):
            self.expected = self._next

    def deal_out(self, ranges: Sequence[Dealt]) -> list[int]:
        """See `DealtCarries.deal_out`; all ranks then expect the same exponents."""
        lost = super().deal_out(ranges)
        if self._initial and not lost:
            self._agree()
        return lost

    def _agree(self) -> None:
        """Have all ranks expect the greatest exponents that any microbatch does; a collective."""
        world, sizes = self._places.world, [len(there) for there in self._initial]
        # As int32, for gloo and NCCL move no int16.
        own = torch.full([sum(sizes)], -1, dtype=torch.int32, device=self._runtime.device)
        for number in range(self._config.num_microbatches):
            state = self.of_leaf(number)
            if state is not None:
                own = torch.maximum(own, torch.cat(list(state.exponents)).to(torch.int32))
        everyone = own.new_empty(world.size * len(own))
        world.all_gather(own, everyone, [len(own)] * world.size)
        greatest = everyone.view(world.size, -1).amax(dim=0)
        has_begun = bool((greatest >= 0).all())
        agreed = torch.split(greatest.to(torch.int16), sizes)
        self.expected = self._next = agreed if has_begun else self._initial

    def check(self, tensors: Mapping[str, Tensor], structures: Mapping[str, Any]) -> None:
        """See `DealtCarries.check`."""
        for number in range(self._first, self.num_carries):
            if structures[str(number)] != _structure(self._shapes):
                raise ValueError(f"{number}: is no state of compression.name={self._name}")
            for name, (dtype, numel) in self._shapes.items():
                there = tensors[f"{number}/{name}"]
                if there.dtype != dtype or there.shape != (numel,):
                    raise ValueError(
                        f"{number}/{name}: is {there.dtype} {list(there.shape)}, must be {dtype} "
                        f"[{numel}]"
                    )

    def _called(self, number: int) -> str:
        if number < self._first:
            return super()._called(number)
        return f"what compression keeps of microbatch {number - self._first}"


def _structure(names: Mapping[str, object]) -> dict[str, Any]:
    return {"dict": {name: {"tensor": name} for name in names}}


def dealt_carries(
    runtime: Runtime,
    config: TrainConfig,
    places: Places,
    flat: FlatTensors,
    first_exponents: Sequence[Tensor],
    has_task: bool,
) -> tuple[DealtCarries | None, CompressedCarries | None]:
    """The carries of microbatches, if they carry anything, and what compression keeps, if it is on.

    The arguments are those of `CompressedCarries`.
    """
    if config.compression.name == "none":
        return DealtCarries(runtime, config, places) if has_task else None, None
    compressed = CompressedCarries(runtime, config, places, flat, first_exponents, has_task)
    return compressed if compressed.num_carries else None, compressed
