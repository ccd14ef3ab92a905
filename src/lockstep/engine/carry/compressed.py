"""What compression keeps of microbatches, as one more carry of each.

So it moves with its microbatch, is saved, digested and copied as carries are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key
from lockstep.engine.carry.group import DealtCarries
from lockstep.engine.carry.tree import Carry
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.places import Places
from lockstep.engine.runtime import Runtime
from lockstep.parallel.arena import Segment
from lockstep.parallel.compression.choice import error_segments

_ERROR, _AGREED = "error", "agreed"


class CompressedCarries(DealtCarries):
    """Carries of the task, if it has any, and behind them what compression keeps (`LeafStates`).

    What was cut off a microbatch is a carry of it. What all ranks have agreed on is a shared one.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        places: Places,
        flat: FlatTensors,
        first_agreed: Sequence[Tensor],
        has_task: bool,
    ) -> None:
        """Begin with nothing.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            places: place of each rank on the mesh.
            flat: trainable parameters in flat memory.
            first_agreed: `agreed` of the first step; nothing if ranks need not agree.
            has_task: whether the task has a carry.
        """
        self._name, feeds_back = config.compression.name, config.compression.error_feedback
        super().__init__(
            runtime, config, places, int(has_task) + int(feeds_back), int(bool(first_agreed))
        )
        self._first = config.num_microbatches * int(has_task)
        self._copies_errors = config.compression.buddy or not feeds_back
        self._initial = list(first_agreed)
        errors: list[Segment] = []
        if feeds_back:
            errors = error_segments(self._name, flat.segments, flat.places)
        self._errors = {f"{_ERROR}_{n}": (s.dtype, [s.numel]) for n, s in enumerate(errors)}
        self._agreed = {
            f"{_AGREED}_{n}": (there.dtype, [*there.shape]) for n, there in enumerate(first_agreed)
        }

    @property
    def are_copied(self) -> bool:
        """Whether each rank keeps those of the rank before it too."""
        # A copy of what is cut off is as large as a gradient, for each microbatch.
        return self._copies_errors and super().are_copied

    @property
    def key(self) -> int:
        """Random key of the present step."""
        return random_key(self._config.seed, Stream.COMPRESSION, self._places.step)

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
        """See `DealtCarries.check`."""
        for number in range(self._first, self.num_carries):
            shapes = self._agreed if number in self._shared else self._errors
            if structures[str(number)] != _structure(shapes):
                raise ValueError(f"{number}: is no state of compression.name={self._name}")
            for name, (dtype, shape) in shapes.items():
                there = tensors[f"{number}/{name}"]
                if there.dtype != dtype or [*there.shape] != shape:
                    raise ValueError(
                        f"{number}/{name}: is {there.dtype} {list(there.shape)}, must be {dtype} "
                        f"{shape}"
                    )

    def _called(self, number: int) -> str:
        if number in self._shared:
            return "what compression has agreed on"
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
    first_agreed: Sequence[Tensor],
    has_task: bool,
) -> tuple[DealtCarries | None, CompressedCarries | None]:
    """The carries of microbatches, if they carry anything, and what compression keeps, if it is on.

    The arguments are those of `CompressedCarries`.
    """
    if config.compression.name == "none":
        return DealtCarries(runtime, config, places) if has_task else None, None
    compressed = CompressedCarries(runtime, config, places, flat, first_agreed, has_task)
    return compressed if compressed.num_carries else None, compressed
