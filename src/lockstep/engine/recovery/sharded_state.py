"""The state of a sharded optimizer: each slice is on its owner and on the next rank of its column.

Every rank steps the slice it owns and, as a buddy, that of the rank before it, from the same
gradient to the same bits. So a slice is lost only if its owner and the next rank die at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.optimizer.optimizer_state import OptimizerState, Scalars
from lockstep.engine.recovery.positions import Held
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import RankFailure, TaskError, shared
from lockstep.parallel.exchange import gather_slices
from lockstep.parallel.fold import slice_up
from lockstep.parallel.mesh import NEW


def holders(column: int, held: Sequence[Held], with_buddy: bool) -> list[int]:
    """For each slice of a column, a rank that holds it.

    Args:
        column: column of the mesh.
        held: what each rank holds.
        with_buddy: whether the next rank of the column holds a slice too.

    Raises:
        RankFailure: some slice has been lost.
    """
    ranks = {there.place: rank for rank, there in enumerate(held) if there.column == column}
    num_slices = max(there.num_places for there in held if there.column == column)
    roots = []
    for owner in range(num_slices):
        there = [owner, (owner + 1) % num_slices] if with_buddy else [owner]
        left = [ranks[place] for place in there if place in ranks]
        if not left:
            raise shared(
                RankFailure(
                    f"the rank with slice {owner} has died, and with it the last copy of its part "
                    "of the optimizer's state (sharding); resume from the newest checkpoint"
                )
            )
        roots.append(left[0])
    return roots


def collect(train_step: TrainStep, held: Sequence[Held], complete: Set[int]) -> OptimizerState:
    """Put together all optimizer state, and parameters in place; a collective of all ranks.

    A broadcast that is interrupted leaves a holder's slice as it was: who receives what it holds
    itself receives the same bits. So it may be done again, with fewer ranks, if it is interrupted.

    Args:
        train_step: training step with parameters and optimizer.
        held: what each rank of the group holds.
        complete: columns of which some rank has all parameters; those stay as they are. None has
            of parameters in slices.

    Returns:
        The state of the column that this rank is in by now, laid out as that column's parameters.

    Raises:
        RankFailure: some slice has been lost.
    """
    placement, flat = train_step.placement, train_step.flat
    own = held[placement.world.rank].column
    mine, state = _joined(train_step, held)
    for column in range(placement.mesh.num_columns):
        roots = holders(column, held, train_step.with_buddy)
        there = flat.segments_of(placement.held_by(column))
        slices = slice_up(there, len(roots))
        for key in ([] if column in complete else [None]) + sorted(state.flats):
            if column == own:
                flats = flat.flats if key is None else mine[key]
            else:
                device = flat.flats[0].device
                flats = [torch.empty(s.numel, dtype=s.dtype, device=device) for s in there]
            for memory, parts in zip(flats, slices, strict=True):
                for part, root in zip(parts, roots, strict=True):
                    if len(part):
                        placement.world.broadcast(memory[part.first : part.last], root)
            if key is not None and column == placement.column:
                state.flats[key] = flats
    return state


def whole_state(train_step: TrainStep) -> OptimizerState:
    """Copies of the state of an optimizer, of this rank's column; a collective if it is shared.

    Numbers, which belong to groups, are those of all columns.
    """
    if not train_step.shares_state:
        return train_step.flat_optimizer.state()
    world = train_step.placement.world
    mine, state = _joined(train_step, [Held(0)] * world.size)
    state.flats.update(mine)
    if train_step.sharded:
        slices = train_step.workspace.slices
        for segments in mine.values():
            for flat, of_ranks in zip(segments, slices, strict=True):
                gather_slices(train_step.placement.data, flat, of_ranks)
    return state


def numbers_of_state(train_step: TrainStep) -> OptimizerState:
    """All of an optimizer's state that is not tensors, and the keys of these; a collective."""
    held = [Held(0)] * train_step.placement.world.size
    return _joined(train_step, held, tensors=False)[1]


def _joined(
    train_step: TrainStep, held: Sequence[Held], tensors: bool = True
) -> tuple[dict[str, list[Tensor]], OptimizerState]:
    """The flats of this rank, in which what others hold is zero; and all ranks' state without them.

    The latter has their keys. Those who hold nothing have no state yet.
    """
    mine = train_step.flat_optimizer.state(tensors)
    own = {"keys": sorted(mine.flats), "scalars": mine.scalars, "shared": mine.shared}
    ranks = train_step.placement.world.gather_json(own)
    known = [theirs for theirs, there in zip(ranks, held, strict=True) if there.column != NEW]
    scalars: Scalars = {}
    for theirs in known:
        # A slice need not hold a piece of every group.
        scalars |= theirs["scalars"]
    keys = sorted({key for theirs in known for key in theirs["keys"]})
    is_new = held[train_step.placement.world.rank].column == NEW
    like = [] if is_new or not tensors else train_step.flat.flats
    flats = {key: mine.flats.get(key) or [torch.zeros_like(f) for f in like] for key in keys}
    shared_by_all = _shared([theirs["shared"] for theirs in known])
    return flats, OptimizerState({key: [] for key in keys}, {}, scalars, shared_by_all)


def _shared(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks agree on; a rank says nothing of groups that it holds no piece of.

    One that holds none of all the groups of an optimizer says nothing of that.

    Raises:
        TaskError: on every rank, if they do not agree.
    """
    merged = everyone[0]
    for theirs in everyone[1:]:
        for path, values in theirs.items():
            known = merged[path]
            pairs = list(zip(known["groups"], values["groups"], strict=True))
            own = {k: v for k, v in values.items() if k != "groups"}
            is_known = any(a is not None for a, _ in pairs)
            says = any(b is not None for _, b in pairs)
            if any(a is not None and b is not None and a != b for a, b in pairs) or (
                is_known and says and any(known[k] != v for k, v in own.items())
            ):
                raise shared(
                    TaskError(
                        "sharding: the optimizer keeps numbers that depend on the "
                        "slice it steps, so it is not element-wise; set sharding=none"
                    )
                )
            if says and not is_known:
                known |= own
            known["groups"] = [b if a is None else a for a, b in pairs]
    return merged
