"""The carries of all microbatches, dealt out to ranks, with a copy of each on another rank.

A rank sends the next one copies of what its microbatches carry before any rank goes on from it. So
there is no moment at which the newest state is in one place only, and the loss of a rank loses none
of it. Ranks that compute a microbatch together all have what it carries, and need no copies.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets
from lockstep.config import TrainConfig
from lockstep.engine.carry.carries import Carries, Held
from lockstep.engine.carry.packing import num_words, pack, unpack
from lockstep.engine.carry.tree import Carry
from lockstep.engine.places import Places
from lockstep.engine.runtime import Runtime
from lockstep.parallel.layout import Dealt


class DealtCarries(Carries):
    """The carries of this rank's microbatches, and those that it keeps for the rank before it.

    Where a microbatch has several, the second one of microbatch m has the number M + m, and so on,
    with M microbatches in all. Last come shared ones, which are of no microbatch: all ranks hold
    them.

    Attributes:
        num_carries: number of all carries.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        places: Places,
        num_of_each: int = 1,
        num_shared: int = 0,
    ) -> None:
        super().__init__()
        num_dealt = num_of_each * config.num_microbatches
        self.num_carries = num_dealt + num_shared
        self._dealt, self._shared = range(num_dealt), range(num_dealt, self.num_carries)
        self._runtime = runtime
        self._config = config
        self._places = places

    @property
    def are_copied(self) -> bool:
        """Whether each rank keeps those of the rank before it too."""
        can_regroup = self._runtime.transport.can_regroup and self._places.world.size > 1
        return self._config.carry.buddy and can_regroup and not self._places.is_split

    @property
    def copy_length(self) -> int:
        """Number of elements that `send_copies` sends of what this step has made."""
        return num_words(self._own_made) if self.are_copied else 0

    @property
    def _own_made(self) -> dict[int, Carry | None]:
        return {number: carry for number, carry in self.made.items() if number in self._dealt}

    def send_copies(self, step: int, lengths: Sequence[int]) -> None:
        """Send what this step has made to the next rank; a collective.

        Args:
            step: number of the step, for faults.
            lengths: `copy_length` of each rank.

        Raises:
            GroupBroken: on all ranks, none of which then goes on from this step.
        """
        if not self.are_copied:
            return
        world = self._places.world
        rank, size = world.rank, world.size
        self._runtime.at("copy", step)
        sent, counts = [0] * size, [0] * size
        sent[(rank + 1) % size], counts[rank - 1] = lengths[rank], lengths[rank - 1]
        received = torch.empty(lengths[rank - 1], dtype=torch.int64, device=self._runtime.device)
        packed = pack(self._own_made, self._runtime.device)
        world.all_to_all(packed, sent, [0] * size, received, counts)
        self.made |= unpack(received)
        world.agree()
        self._runtime.at("copied", step)

    def settle(self, norm: float) -> None:
        """Commit what the step has made, or skip it, as its optimizer does; talks to nobody.

        Args:
            norm: norm of the step's gradient; not finite if fp16 skips the step.
        """
        if math.isfinite(norm):
            for number in self._shared:
                # Lacking on a rank that follows others without the sums: it comes from them.
                if number not in self.made:
                    self.held.pop(number, None)
            self.commit()
        else:
            self.skip()

    def deal_out(self, ranges: Sequence[Dealt]) -> list[int]:
        """Bring carries to the ranks that are to compute their microbatches; a collective.

        Args:
            ranges: microbatches of each rank.

        Returns:
            The numbers of the carries that nobody holds, the same on all ranks.
            If there are any, each rank holds what it held.

        Raises:
            GroupBroken: on all ranks, which hold what they held.
        """
        world, num = self._places.world, self._config.num_microbatches
        owners = [world.rank, world.rank - 1] if self.are_copied else [world.rank]
        own = {
            first + number
            for owner in owners
            for number in range(*ranges[owner])
            if number < num
            for first in range(0, len(self._dealt), num)
        } | {*self._shared}
        arrived, lost = moved(world, self.held, own, self._runtime.device)
        world.agree()
        if not lost:
            self.take(arrived)
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
        for theirs in self._places.world.gather_json(self.digests()):
            known |= theirs
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def on_first(self) -> dict[int, Carry | None]:
        """All carries on rank 0, for a checkpoint; nothing elsewhere; a collective."""
        world = self._places.world
        own = range(self.num_carries) if world.rank == 0 else ()
        return moved(world, self.held, own, self._runtime.device)[0]


def moved(
    transport: Transport, held: Held, own: Collection[int], device: torch.device
) -> tuple[dict[int, Carry | None], list[int]]:
    """Bring carries from ranks that hold them to those where they are wanted; a collective.

    Args:
        transport: the group of ranks.
        held: what this rank holds.
        own: numbers of those that are wanted here.
        device: device that they are on.

    Returns:
        Those wanted, and the numbers of those that are wanted somewhere and that nobody holds, the
        same on all ranks.

    Raises:
        GroupBroken: a rank was lost.
    """
    everyone = transport.gather_json([sorted(held), sorted(own)])
    source: dict[int, int] = {}
    for rank, (there, _) in enumerate(everyone):
        for number in there:
            source.setdefault(number, rank)
    lost = sorted({n for _, numbers in everyone for n in numbers if n not in source})
    rank = transport.rank
    missing = [set(numbers) - set(there) for there, numbers in everyone]
    packages = [
        pack({n: carry for n, carry in held.items() if n in numbers and source[n] == rank}, device)
        for numbers in missing
    ]
    lengths = transport.gather_json([len(package) for package in packages])
    sent, counts = lengths[rank], [theirs[rank] for theirs in lengths]
    received = torch.empty(sum(counts), dtype=torch.int64, device=device)
    transport.all_to_all(torch.cat(packages), sent, offsets(sent), received, counts)
    arrived = {number: held[number] for number in own if number in held}
    for first, count in zip(offsets(counts), counts, strict=True):
        arrived |= unpack(received[first : first + count])
    return arrived, lost
