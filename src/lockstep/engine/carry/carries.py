"""What microbatches carry from step to step, as far as one rank computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.carry.tree import Carry, check_carry

Held = Mapping[int, Carry | None]
"""Carries by number of their microbatch; None for a microbatch that had no samples so far."""


class Carries:
    """Carries of some microbatches; what a step makes of them counts from `commit` on.

    Until then the step can be given up, and done again from what was there before it.

    Attributes:
        held: the committed ones.
    """

    def __init__(self) -> None:
        self.held: dict[int, Carry | None] = {}
        self.made: dict[int, Carry | None] = {}

    def begin(self) -> None:
        """Forget what another step, or another try of this one, has made."""
        self.made = {}

    def of(self, microbatch: int) -> Carry | None:
        """What a microbatch carries from the step before; None if it has nothing yet."""
        return self.held.get(microbatch)

    def make(self, microbatch: int, carry: Carry | None) -> None:
        """Note what a microbatch carries to the next step."""
        self.made[microbatch] = carry

    def commit(self) -> None:
        """Go on from what this step has made."""
        self.held |= self.made

    def skip(self) -> None:
        """Go on from what was there before a step that changes nothing."""
        self.held = dict.fromkeys(self.made) | self.held

    def take(self, carries: Held) -> None:
        """Hold these and no others."""
        self.held = dict(carries)
        self.begin()

    def digests(self) -> dict[str, str]:
        """SHA-256 of each carry, by a name for people."""
        return {
            self._called(number): carry.digest if carry else ""
            for number, carry in sorted(self.held.items())
        }

    def _called(self, number: int) -> str:
        return f"the carry of microbatch {number}"


def named_tensors(carries: Held) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors on the CPU by "microbatch/name", and structures by microbatch, for a checkpoint."""
    tensors = {
        f"{number}/{name}": tensor.cpu()
        for number, carry in carries.items()
        if carry
        for name, tensor in carry.tensors.items()
    }
    structures = {str(n): carry and carry.structure for n, carry in sorted(carries.items())}
    return tensors, structures


def check_named(tensors: Mapping[str, Tensor], structures: object, num_carries: int) -> None:
    """Refuse what `named_tensors` cannot have made of so many carries.

    Raises:
        ValueError: says what is wrong.
    """
    numbers = [str(number) for number in range(num_carries)]
    if not isinstance(structures, dict) or sorted(structures) != sorted(numbers):
        raise ValueError(f"must be an object with the keys 0 to {num_carries - 1}")
    left = dict(tensors)
    for number, structure in structures.items():
        own = [name for name in left if name.partition("/")[0] == number]
        try:
            check_carry(structure, {name.partition("/")[2]: left.pop(name) for name in own})
        except ValueError as error:
            raise ValueError(f"microbatch {number}: {error}") from None
    if left:
        raise ValueError(f"tensor {min(left)!r} is of no microbatch")


def from_named(
    tensors: Mapping[str, Tensor], structures: Mapping[str, Any], device: torch.device
) -> dict[int, Carry | None]:
    """The inverse of `named_tensors`."""
    by_number: dict[str, dict[str, Tensor]] = {number: {} for number in structures}
    for name, tensor in tensors.items():
        number, _, path = name.partition("/")
        by_number[number][path] = tensor.to(device)
    return {
        int(number): None if structure is None else Carry(structure, by_number[number])
        for number, structure in structures.items()
    }
