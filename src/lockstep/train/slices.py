"""The state of a sharded optimizer: each slice is on its owner and on the next rank.

Every rank steps the slice it owns and, as a buddy, that of the rank before it, from the same
gradient to the same bits. So a slice is lost only if its owner and the next rank die at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.errors import RankFailure
from lockstep.parallel.arena import slice_up
from lockstep.train.optimizer import Scalars
from lockstep.train.step import Step


class SteppedState(NamedTuple):
    """An optimizer's whole state.

    Attributes:
        flats: by key, laid out as the parameters.
        scalars: all else.
    """

    flats: dict[str, list[Tensor]]
    scalars: Scalars


def holders(num_slices: int, members: Sequence[int], with_buddy: bool) -> list[int]:
    """For each slice, a rank that holds it.

    Args:
        num_slices: one for each rank there was.
        members: for each rank there is, the one it was; -1 for newcomers.
        with_buddy: whether the next rank holds a slice too.

    Raises:
        RankFailure: some slice has been lost.
    """
    found = []
    for owner in range(num_slices):
        there = [owner, (owner + 1) % num_slices] if with_buddy else [owner]
        left = [members.index(rank) for rank in there if rank in members]
        if not left:
            raise RankFailure(
                f"rank {owner} has died, and with it the last copy of its part of the optimizer's "
                "state (optimizer.sharded=true); resume from the newest checkpoint"
            )
        found.append(left[0])
    return found


def collect(
    transport: Transport, step: Step, members: Sequence[int], num_members: int
) -> SteppedState:
    """Put together all parameters, in place, and all optimizer state; a collective.

    A broadcast that is interrupted leaves a holder's slice as it was: who receives what it holds
    itself receives the same bits.

    May be done again, with fewer members, if it is interrupted.

    Args:
        transport: the group of ranks.
        step: holds parameters and optimizer.
        members: for each rank of the present group, the one it had when slices were dealt out; -1
            for newcomers.
        num_members: how many ranks there were then.

    Raises:
        RankFailure: some slice has been lost.
    """
    roots = holders(num_members, members, step.with_buddy)
    slices = slice_up(step.flat.segments, num_members)
    flats = _own_flats(transport, step)
    for segments in [step.flat.flats, *flats.values()]:
        for flat, parts in zip(segments, slices, strict=True):
            for part, root in zip(parts, roots, strict=True):
                if len(part):
                    transport.broadcast(flat[part.first : part.last], root)
    return SteppedState(flats, _all_scalars(transport, step))


def whole_state(transport: Transport, step: Step) -> SteppedState:
    """Copies of the state of an optimizer; a collective if it is sharded."""
    if not step.sharded:
        return SteppedState(step.stepper.state_flats(), step.stepper.state_scalars())
    flats = _own_flats(transport, step)
    for segments in flats.values():
        for segment, flat in enumerate(segments):
            step.share.reduction.gather(segment, flat)
    return SteppedState(flats, _all_scalars(transport, step))


def _own_flats(transport: Transport, step: Step) -> dict[str, list[Tensor]]:
    """This rank's part of the state; zeros for keys that others alone have."""
    mine = step.stepper.state_flats()
    keys = sorted({key for keys in transport.gather_json(sorted(mine)) for key in keys})
    return {k: mine.get(k) or [torch.zeros_like(f) for f in step.flat.flats] for k in keys}


def _all_scalars(transport: Transport, step: Step) -> Scalars:
    # A slice need not hold a piece of every group.
    scalars: Scalars = {}
    for theirs in transport.gather_json(step.stepper.state_scalars()):
        scalars |= theirs
    return scalars
