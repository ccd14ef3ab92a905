"""What a communication profile measures, by name, and the arithmetic of its bandwidths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Layer = Literal["lockstep", "torch"]
"""Who is called: Lockstep's transport and what the engine builds on it, or `torch.distributed`."""


@dataclass(frozen=True)
class Operation:
    """A collective or a message.

    Attributes:
        layer: who is called.
        name: name of it, unique in its layer.
        meaning: what is done, and what its size is that of.
        factor: function from the number of ranks to bus bandwidth over algorithm bandwidth: the
            part of the size that goes in or out of the busiest rank.
        has_size: whether it moves anything that the caller has chosen.
        least_bytes: least size that it can have.
        most_bytes: greatest size that it is measured with.
        copies: memory that a rank needs, as a multiple of the size.
    """

    layer: Layer
    name: str
    meaning: str
    factor: Callable[[int], float]
    has_size: bool = True
    least_bytes: int = 1
    most_bytes: int = 1 << 62
    copies: int = 2

    @property
    def key(self) -> str:
        """Its name among those of both layers."""
        return f"{self.layer}/{self.name}"


def _whole(num_ranks: int) -> float:
    return 1.0


def _of_others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


def _of_others_uneven(num_ranks: int) -> float:
    # Rank 0 has two of n + 1 parts; a rank that has one gets all others.
    return num_ranks / (num_ranks + 1)


def _nothing(num_ranks: int) -> float:
    return 0.0


_ALL = (
    Operation(
        "lockstep", "ordered_sum",
        "a gradient of this size summed in the canonical order of microbatches, for all ranks",
        _twice, least_bytes=4096, copies=4,
    ),
    Operation(
        "lockstep", "all_gather", "equal parts of all ranks, together of this size, for all ranks",
        _of_others,
    ),
    Operation(
        "lockstep", "all_gather_uneven",
        "the same, but rank 0's part is twice as large as the others'", _of_others_uneven, copies=4,
    ),
    Operation(
        "lockstep", "all_to_all", "each rank sends this size, the same part of it to each rank",
        _of_others,
    ),
    Operation(
        "lockstep", "to_next", "each rank sends this size to the next one, by an all-to-all",
        _whole,
    ),
    Operation("lockstep", "broadcast", "rank 0's tensor of this size, for all ranks", _whole),
    Operation(
        "lockstep", "message", "a tensor of this size from one rank to another: half of there and "
        "back", _whole,
    ),
    Operation(
        "lockstep", "gather_json", "equal texts of all ranks, together of this size, as JSON",
        _of_others, most_bytes=64 << 10, copies=8,
    ),
    Operation("lockstep", "barrier", "all ranks have come", _nothing, has_size=False),
    Operation(
        "lockstep", "agree", "all ranks know that all have come", _nothing, has_size=False
    ),
    Operation("torch", "all_reduce", "the sum of all ranks' tensors of this size", _twice),
    Operation(
        "torch", "all_gather", "equal parts of all ranks, together of this size, for all ranks",
        _of_others,
    ),
    Operation(
        "torch", "reduce_scatter", "the sum of all ranks' tensors of this size, a part for each "
        "rank", _of_others, copies=3,
    ),
    Operation(
        "torch", "all_to_all", "each rank sends this size, the same part of it to each rank",
        _of_others,
    ),
    Operation("torch", "broadcast", "rank 0's tensor of this size, for all ranks", _whole),
    Operation(
        "torch", "send_recv", "a tensor of this size from one rank to another: half of there and "
        "back", _whole,
    ),
    Operation("torch", "barrier", "all ranks have come", _nothing, has_size=False),
)  # fmt: skip

OPERATIONS: Mapping[str, Operation] = MappingProxyType({one.key: one for one in _ALL})
"""Everything that is measured, by key, in the order of the tables."""
