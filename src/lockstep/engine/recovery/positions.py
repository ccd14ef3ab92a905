"""After the loss of ranks, or with new ones: who comes from where, and who is ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.comm.transport import GroupBroken, Transport
from lockstep.engine.events import Warned
from lockstep.engine.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.train_step import StepResult
from lockstep.errors import RankFailure, shared

_PREFIX = "val/"


NOWHERE = -1
"""The rank that a newcomer had."""


@dataclass(frozen=True)
class Origin:
    """Where a group's ranks come from.

    Attributes:
        former: for each rank, the one it had before the loss.
        members: for each rank, the one it had when state was dealt out.
        num_members: how many ranks there were then.
        rows: for each rank, what its `Joined` event says.
        strangers: for each newcomer that would train something else, what differs.
    """

    former: list[int]
    members: list[int]
    num_members: int
    rows: list[dict[str, Any]]
    strangers: dict[int, list[str]]


def find_origin(
    transport: Transport,
    former: int,
    member: int,
    num_members: int,
    row: dict[str, Any],
    facts: dict[str, Any],
) -> Origin:
    """Find out where the ranks of a new group come from, given where this one does; a collective.

    Raises:
        RankFailure: they are all newcomers.
    """
    found = transport.gather_json([former, member, num_members, row, facts])
    if max(n for _, _, n, _, _ in found) == 0:
        raise shared(
            RankFailure(
                "all ranks that had begun have died; go on from the newest checkpoint with "
                "`lockstep resume`"
            )
        )
    formers, members, sizes, rows, known = zip(*found, strict=True)
    expected = next(f for f, rank in zip(known, formers, strict=True) if rank != NOWHERE)
    differences = {
        rank: [name for name in expected | theirs if expected.get(name) != theirs.get(name)]
        for rank, theirs in enumerate(known)
    }
    strangers = {rank: names for rank, names in differences.items() if names}
    return Origin(list(formers), list(members), max(sizes), list(rows), strangers)


def refuse_strangers(runtime: Runtime, origin: Origin, step: int) -> None:
    """Go on without newcomers whose script or data have changed since the run began.

    Args:
        runtime: of this process.
        origin: where the ranks of the group come from.
        step: that this rank has reached.

    Raises:
        GroupBroken: there are such ones, who leave; the others regroup.
    """
    if not origin.strangers:
        return
    if runtime.transport.rank in origin.strangers:
        runtime.transport.withdraw()
    for rank, names in origin.strangers.items():
        row = origin.rows[rank]
        message = (
            f"the new process of slot {row['slot']} on {row['host']} is refused: it differs in "
            f"{', '.join(names)}; the script or its data have changed since the run began; "
            "training goes on without it"
        )
        runtime.emit(Warned(step=step, message=message))
    runtime.transport.stop_growing()
    raise GroupBroken("a new process is refused")


@dataclass(frozen=True)
class Lead:
    """The state that all ranks are to have.

    Attributes:
        rank: the lowest one that has it, one that has committed it if there is one.
        step: its committed steps, and one that it has applied.
        committed: its committed steps.
        evaluated: the step of its newest evaluation.
        result: of its last one, if it has done one in this sitting.
        metrics: of the validation split.
        is_ahead: whether some ranks have not applied that step, or have not committed it as the
            leading rank has.
    """

    rank: int
    step: int
    committed: int
    evaluated: int
    result: StepResult | None
    metrics: dict[str, float]
    is_ahead: bool


def find_lead(
    transport: Transport,
    progress: Progress,
    result: StepResult | None,
    applied: StepResult | None,
    is_new: bool,
) -> Lead:
    """Find out which rank has come furthest; a collective.

    A rank commits a step when the reduction is done, and the next reduction needs all ranks. So
    ranks differ by one step at most.

    Args:
        transport: the group of ranks.
        progress: of this rank.
        result: of its last step.
        applied: of the step after that, if it has been applied but not committed.
        is_new: whether this rank has no state yet.
    """
    positions = transport.gather_json(
        [NOWHERE, NOWHERE, NOWHERE]
        if is_new
        else [progress.step + (applied is not None), progress.step, progress.evaluated]
    )
    step, committed, evaluated = max(positions)
    rank = positions.index([step, committed, evaluated])
    assert all(step - theirs <= 1 for theirs, _, _ in positions if theirs != NOWHERE)
    own = [applied or result, progress.metrics] if transport.rank == rank else None
    values, metrics = transport.gather_json(own)[rank]
    return Lead(
        rank,
        step,
        committed,
        evaluated,
        StepResult(*values) if values else None,
        {k.removeprefix(_PREFIX): v for k, v in metrics.items() if k.startswith(_PREFIX)},
        any(theirs[:2] < [step, committed] for theirs in positions),
    )
