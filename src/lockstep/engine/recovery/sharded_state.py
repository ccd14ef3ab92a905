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
from lockstep.engine.recovery.leader import Owned
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import RankFailure, TaskError, shared
from lockstep.parallel.exchange import gather_slices
from lockstep.parallel.fold import slice_up
from lockstep.parallel.mesh import NEW


def slice_roots(column: int, owned: Sequence[Owned], with_buddy: bool) -> list[int]:
    """For each slice of a column, the rank that broadcasts it: its owner, or else the buddy.

    Args:
        column: column of the mesh.
        owned: what each rank owns.
        with_buddy: whether the next rank of the column has a slice too.

    Raises:
        RankFailure: some slice has been lost.
    """
    ranks = {there.slice: rank for rank, there in enumerate(owned) if there.column == column}
    num_slices = max(there.num_slices for there in owned if there.column == column)
    roots = []
    for owner in range(num_slices):
        there = [owner, (owner + 1) % num_slices] if with_buddy else [owner]
        left = [ranks[number] for number in there if number in ranks]
        if not left:
            raise shared(
                RankFailure(
                    f"the rank with slice {owner} has died, and with it the last copy of its part "
                    "of the optimizer's state (sharding); resume from the newest checkpoint"
                )
            )
        roots.append(left[0])
    return roots


def collect(train_step: TrainStep, owned: Sequence[Owned], complete: Set[int]) -> OptimizerState:
    """Put together all optimizer state, and parameters in place; a collective of all ranks.

    An interrupted broadcast leaves a slice intact on the ranks that have it: they receive the same
    bits that they have. So it can be repeated with fewer ranks.

    Args:
        train_step: training step with parameters and optimizer.
        owned: what each rank of the group owns.
        complete: columns of which some rank has all parameters; those stay as they are. None has
            of parameters in slices.

    Returns:
        The state of the column that this rank is in by now, laid out as that column's parameters.

    Raises:
        RankFailure: some slice has been lost.
    """
    placement, flat = train_step.placement, train_step.flat
    own = owned[placement.world.rank].column
    mine, state = _joined(train_step, owned)
    for column in range(placement.mesh.num_columns):
        roots = slice_roots(column, owned, train_step.with_buddy)
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
    mine, state = _joined(train_step, [Owned(0)] * world.size)
    state.flats.update(mine)
    if train_step.sharded:
        slices = train_step.workspace.slices
        for segments in mine.values():
            for flat, of_ranks in zip(segments, slices, strict=True):
                gather_slices(train_step.placement.data, flat, of_ranks)
    return state


def numbers_of_state(train_step: TrainStep) -> OptimizerState:
    """All of an optimizer's state that is not tensors, and the keys of these; a collective."""
    owned = [Owned(0)] * train_step.placement.world.size
    return _joined(train_step, owned, tensors=False)[1]


def _joined(
    train_step: TrainStep, owned: Sequence[Owned], tensors: bool = True
) -> tuple[dict[str, list[Tensor]], OptimizerState]:
    """The flats of this rank, zero where others own them; and all ranks' state without flats.

    The latter has their keys. Ranks that own nothing have no state yet.
    """
    mine = train_step.flat_optimizer.state(tensors)
    own = {"keys": sorted(mine.flats), "scalars": mine.scalars, "shared": mine.shared}
    ranks = train_step.placement.world.gather_json(own)
    known = [theirs for theirs, there in zip(ranks, owned, strict=True) if there.column != NEW]
    scalars: Scalars = {}
    for theirs in known:
        # A slice need not contain a piece of every group.
        scalars |= theirs["scalars"]
    keys = sorted({key for theirs in known for key in theirs["keys"]})
    is_new = owned[train_step.placement.world.rank].column == NEW
    like = [] if is_new or not tensors else train_step.flat.flats
    flats = {key: mine.flats.get(key) or [torch.zeros_like(f) for f in like] for key in keys}
    shared_by_all = _shared([theirs["shared"] for theirs in known])
    return flats, OptimizerState({key: [] for key in keys}, {}, scalars, shared_by_all)


def _shared(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks agree on. A rank has no values for groups of which it owns no piece.

    One that owns no piece of any group of an optimizer has no values for that optimizer.

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
