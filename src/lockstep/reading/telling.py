"""Differences between runs in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.observe import Measured, text
from lockstep.reading.differences import Partings
from lockstep.reading.history import History
from lockstep.reading.listing import Summary


def letter(number: int) -> str:
    """What a run is called in a comparison: A, B and so on."""
    return chr(ord("A") + number) if number < 26 else f"run {number + 1}"


def cost_of_run(summary: Summary, history: History) -> Measured:
    """What the steps of a run cost: as its result says, else as its events tell by now."""
    return summary.cost or history.cost


def costs_of_runs(costs: Sequence[Measured]) -> Iterator[list[str]]:
    """Rows of a comparison: names, and for each run what its steps cost and what was predicted.

    There are none where nothing is known of any run; a run of which nothing is known has "".
    """
    measured = [text.brief(cost.measured.step_s) if cost.measured else "" for cost in costs]
    predicted = [
        f"{text.brief(cost.predicted.step_s)} ({cost.by})" if cost.predicted else ""
        for cost in costs
    ]
    if any(measured):
        yield ["time of a step", *measured]
        yield ["predicted", *predicted]


def lines_of_partings(pair: str, found: Partings) -> Iterator[str]:
    """Where two runs part.

    Args:
        pair: what they are called.
        found: where they do.
    """
    curves, tensors = found.curves, found.tensors
    if curves is None:
        steps = text.count(found.num_steps, "step")
        yield f"{pair}: no curve differs in the {steps} at which both have values of the same steps"
    else:
        one, other = curves.values
        known = "" if curves.last_equal is None else f"; equal up to step {curves.last_equal:,}"
        yield f"{pair} part at step {curves.step:,}: {curves.name} {one!r}, {other!r}{known}"
    if tensors is None:
        pairs = text.count(found.num_checkpoints, "checkpoint")
        yield f"{pair}: none of the {pairs} that both have differs"
        return
    known = "" if tensors.last_equal is None else f"; equal in that of step {tensors.last_equal:,}"
    yield f"{pair} differ in the checkpoint of step {tensors.step:,}{known}"
    values = f"{tensors.values[0]}, {tensors.values[1]}"
    if tensors.count:
        place = f"[{', '.join(map(str, tensors.place))}]"
        yield (
            f"  first tensor {tensors.name} ({tensors.file}): {tensors.count:,} of "
            f"{text.count(tensors.size, 'element')}, the first at {place}: {values}"
        )
    else:
        yield f"  first tensor {tensors.name} ({tensors.file}): {values}"
    if tensors.others:
        yield f"  and {text.count(tensors.others, 'other tensor')}"
