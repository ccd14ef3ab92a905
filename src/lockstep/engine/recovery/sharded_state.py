"""The state of a sharded optimizer: each slice is on its owner and on the next rank.

Every rank steps the slice it owns and, as a buddy, that of the rank before it, from the same
gradient to the same bits. So a slice is lost only if its owner and the next rank die at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.comm.transport import Transport
from lockstep.engine.checkpoint.optimizer_state import OptimizerState, Scalars
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import RankFailure, TaskError, shared
from lockstep.parallel.arena import slice_up


def holders(num_slices: int, members: Sequence[int], with_buddy: bool) -> list[int]:
    """For each slice, a rank that holds it.

    Args:
        num_slices: number of slices, one for each rank that there was.
        members: former rank of each rank that there is; -1 for newcomers.
        with_buddy: whether the next rank holds a slice too.

    Raises:
        RankFailure: some slice has been lost.
    """
    roots = []
    for owner in range(num_slices):
        there = [owner, (owner + 1) % num_slices] if with_buddy else [owner]
        left = [members.index(rank) for rank in there if rank in members]
        if not left:
            raise shared(
                RankFailure(
                    f"rank {owner} has died, and with it the last copy of its part of the "
                    "optimizer's state (optimizer.sharded=true); resume from the newest checkpoint"
                )
            )
        roots.append(left[0])
    return roots


def collect(
    transport: Transport,
    train_step: TrainStep,
    members: Sequence[int],
    num_members: int,
    with_parameters: bool = True,
) -> OptimizerState:
    """Put together all parameters, in place, and all optimizer state; a collective.

    A broadcast that is interrupted leaves a holder's slice as it was: who receives what it holds
    itself receives the same bits.

    May be done again, with fewer members, if it is interrupted.

    Args:
        transport: the group of ranks.
        train_step: training step with parameters and optimizer.
        members: rank when slices were dealt out, for each rank of the present group; -1
            for newcomers.
        num_members: number of ranks at that time.
        with_parameters: whether to put the parameters together; otherwise they stay as they are.

    Raises:
        RankFailure: some slice has been lost.
    """
    roots = holders(num_members, members, train_step.with_buddy)
    slices = slice_up(train_step.flat.segments, num_members)
    state = _joined(transport, train_step, members)
    parameters = [train_step.flat.flats] if with_parameters else []
    for segments in [*parameters, *state.flats.values()]:
        for flat, parts in zip(segments, slices, strict=True):
            for part, root in zip(parts, roots, strict=True):
                if len(part):
                    transport.broadcast(flat[part.first : part.last], root)
    return state


def whole_state(transport: Transport, train_step: TrainStep) -> OptimizerState:
    """Copies of the state of an optimizer; a collective if it is sharded."""
    if not train_step.sharded:
        return train_step.flat_optimizer.state()
    state = _joined(transport, train_step, range(transport.size))
    for segments in state.flats.values():
        for segment, flat in enumerate(segments):
            train_step.workspace.reduction.gather(segment, flat)
    return state


def _joined(transport: Transport, train_step: TrainStep, members: Sequence[int]) -> OptimizerState:
    """All ranks' state, but for the flats: of these the part of this rank.

    Newcomers, whose member is -1, have none yet.
    """
    mine = train_step.flat_optimizer.state()
    own = {"keys": sorted(mine.flats), "scalars": mine.scalars, "shared": mine.shared}
    ranks = transport.gather_json(own)
    flats: dict[str, list[torch.Tensor]] = {}
    scalars: Scalars = {}
    for key in sorted({key for theirs in ranks for key in theirs["keys"]}):
        flats[key] = mine.flats.get(key) or [torch.zeros_like(f) for f in train_step.flat.flats]
    known = [theirs for theirs, member in zip(ranks, members, strict=True) if member >= 0]
    for theirs in known:
        # A slice need not hold a piece of every group.
        scalars |= theirs["scalars"]
    return OptimizerState(flats, {}, scalars, _shared([theirs["shared"] for theirs in known]))


def _shared(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks agree on; a rank says nothing of groups that it holds no piece of.

    Raises:
        TaskError: on every rank, if they do not agree.
    """
    merged = everyone[0]
    for theirs in everyone[1:]:
        for path, values in theirs.items():
            known = merged[path]
            pairs = list(zip(known["groups"], values["groups"], strict=True))
            own = {k: v for k, v in values.items() if k != "groups"}
            if any(a is not None and b is not None and a != b for a, b in pairs) or (
                any(b is not None for _, b in pairs) and any(known[k] != v for k, v in own.items())
            ):
                raise shared(
                    TaskError(
                        "optimizer.sharded=true: the optimizer keeps numbers that depend on the "
                        "slice it steps, so it is not element-wise; set optimizer.sharded=false"
                    )
                )
            known["groups"] = [b if a is None else a for a, b in pairs]
    return merged
