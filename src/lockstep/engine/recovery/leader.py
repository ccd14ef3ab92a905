"""What the members of a new group have: their former ranks, which is furthest, optimizer state.

Of a sharded optimizer each slice is on its owner and on the next rank of its column. Every rank
steps the slice it owns and, as a buddy, that of the rank before it, from the same gradient to the
same bits. So a slice is lost only if its owner and the next rank die at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import GroupBroken, Transport
from lockstep.engine.evaluation.batches import Scores, by_split
from lockstep.engine.events import Warned
from lockstep.engine.optimizer.optimizer_state import OptimizerState, Scalars
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.sums import StepResult
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import RankFailure, TaskError, shared
from lockstep.parallel.fold import slice_up
from lockstep.parallel.mesh import NEW

NOWHERE = -1
"""The rank that a joining rank had."""


class Owned(NamedTuple):
    """The part of parameters and optimizer state that a rank owns; by default nothing."""

    column: int = NEW
    """Its column of the mesh."""
    slice: int = NOWHERE
    """The slice of the column that it owns, where the optimizer is sharded."""
    num_slices: int = 0
    """How many slices the column has: one for each of the ranks that it had."""


@dataclass(frozen=True)
class Origin:
    """The former ranks of the members of a group.

    Attributes:
        former: rank before the loss, for each rank of the new group; `NOWHERE` for joining ranks.
        owned: what each rank of the new group owns.
        rows: fields of the `Joined` event of each rank.
        foreign_ranks: names of the facts that differ, by rank of those that would train something
            else.
    """

    former: list[int]
    owned: list[Owned]
    rows: list[dict[str, Any]]
    foreign_ranks: dict[int, list[str]]


def find_origin(
    transport: Transport,
    former: int,
    owned: Owned,
    row: dict[str, Any],
    facts: dict[str, Any],
) -> Origin:
    """Find out where the ranks of a new group come from, given where this one does; a collective.

    Raises:
        RankFailure: they are all joining ranks.
    """
    own = {"former": former, "owned": owned, "row": row, "facts": facts}
    ranks = transport.gather_json(own)
    if all(theirs["former"] == NOWHERE for theirs in ranks):
        raise shared(
            RankFailure(
                "all ranks that had begun have died; go on from the newest checkpoint with "
                "`lockstep resume`"
            )
        )
    expected = next(theirs["facts"] for theirs in ranks if theirs["former"] != NOWHERE)
    differences = {
        rank: [n for n in expected | theirs["facts"] if expected.get(n) != theirs["facts"].get(n)]
        for rank, theirs in enumerate(ranks)
    }
    return Origin(
        former=[theirs["former"] for theirs in ranks],
        owned=[Owned(*theirs["owned"]) for theirs in ranks],
        rows=[theirs["row"] for theirs in ranks],
        foreign_ranks={rank: names for rank, names in differences.items() if names},
    )


def refuse_foreign_ranks(runtime: Runtime, origin: Origin, step: int) -> None:
    """Go on without joining ranks whose script or data have changed since the run began.

    Args:
        runtime: surroundings of this process.
        origin: former ranks of the members of the group.
        step: number of steps that this rank has committed.

    Raises:
        GroupBroken: there are such ones, who leave; the others regroup.
    """
    if not origin.foreign_ranks:
        return
    if runtime.transport.rank in origin.foreign_ranks:
        runtime.transport.withdraw()
    for rank, names in origin.foreign_ranks.items():
        row = origin.rows[rank]
        message = (
            f"the new process of slot {row['slot']} on {row['host']} is refused: it differs in "
            f"{', '.join(names)}; the script or its data have changed since the run began; "
            "training goes on without it"
        )
        runtime.emit(Warned(step=step, message=message))
    runtime.transport.stop_growing()
    raise GroupBroken("a new process is refused")


class Position(NamedTuple):
    """The progress of a rank; `NOWHERE` in all fields for one that has no state yet."""

    step: int
    """Committed steps, and one that it has applied."""
    committed: int
    """Committed steps."""
    evaluated: int
    """The step of its newest evaluation."""


@dataclass(frozen=True)
class Lead:
    """The state that all ranks are to have.

    Attributes:
        rank: lowest rank that has it, and that has committed it if any rank has.
        step: number of steps that it has applied, committed or not.
        committed: number of steps that it has committed.
        evaluated: step of its newest evaluation.
        result: result of its last step, if it has done one in this session.
        scores: scores of the validation splits.
        is_ahead: whether some ranks have not applied that step, or have not committed it as the
            leading rank has.
        have_committed: for each rank, whether it has committed that step.
    """

    rank: int
    step: int
    committed: int
    evaluated: int
    result: StepResult | None
    scores: dict[str, Scores]
    is_ahead: bool
    have_committed: list[bool]


def find_lead(
    transport: Transport,
    progress: Progress,
    result: StepResult | None,
    applied: StepResult | None,
    is_new: bool,
) -> Lead:
    """Find out which rank is furthest; a collective.

    A rank commits a step when the reduction is done, and the next reduction needs all ranks. So
    ranks differ by one step at most.

    Args:
        transport: the group of ranks.
        progress: position of this rank.
        result: result of the last step that this rank has committed.
        applied: result of the step after that, if it has been applied but not committed.
        is_new: whether this rank has no state yet.
    """
    own = Position(NOWHERE, NOWHERE, NOWHERE)
    if not is_new:
        own = Position(progress.step + (applied is not None), progress.step, progress.evaluated)
    positions = [Position(*values) for values in transport.gather_json(own)]
    lead = max(positions)
    rank = positions.index(lead)
    assert all(lead.step - p.step <= 1 for p in positions if p.step != NOWHERE)
    newest = applied or result
    known: dict[str, Any] = {}
    if transport.rank == rank:
        known = {
            "result": newest.to_json() if newest else None,
            "metrics": progress.metrics,
            "arrays": progress.arrays,
        }
    known = transport.gather_json(known)[rank]
    metrics, arrays = by_split(known["metrics"]), by_split(known["arrays"])
    return Lead(
        rank=rank,
        step=lead.step,
        committed=lead.committed,
        evaluated=lead.evaluated,
        result=StepResult(**known["result"]) if known["result"] else None,
        scores={name: Scores(values, arrays.get(name, {})) for name, values in metrics.items()},
        is_ahead=any((p.step, p.committed) < (lead.step, lead.committed) for p in positions),
        have_committed=[p.committed == lead.step for p in positions],
    )


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
