"""The former ranks of a new group's members, and which of them is furthest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.comm.transport import GroupBroken, Transport
from lockstep.engine.evaluation.batches import Scores, by_split
from lockstep.engine.events import Warned
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.sums import StepResult
from lockstep.errors import RankFailure, shared
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
            "result": newest._asdict() if newest else None,
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
        result=StepResult.from_json(known["result"]) if known["result"] else None,
        scores={name: Scores(values, arrays.get(name, {})) for name, values in metrics.items()},
        is_ahead=any((p.step, p.committed) < (lead.step, lead.committed) for p in positions),
        have_committed=[p.committed == lead.step for p in positions],
    )
