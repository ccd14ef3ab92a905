"""Whether faults have made any difference to a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lockstep.commands.chaos.table import Effect, Row
from lockstep.commands.evaluations import Row as Evaluation
from lockstep.commands.evaluations import evaluated, first_difference, num_evaluations
from lockstep.observe.text import count

_DIGESTS = {"params_sha256": "", "carry_sha256": " of the carry",
            "tables_sha256": " of the rows of tables"}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a run has left.

    Attributes:
        result: content of its `result.json`.
        steps: steps of the rows of its `metrics.csv` that are of training, in order.
        events: rows of its `events.jsonl`.
    """

    result: dict[str, Any]
    steps: Sequence[int]
    events: Sequence[Row]


def verdict(
    reference: Trained,
    run: Trained,
    effects: Sequence[Effect],
    lost: Sequence[int],
    console: Console,
) -> int:
    """Print what is equal and what is not.

    Args:
        reference: what the run without faults has left.
        run: what the one with faults has left.
        effects: what the faults did.
        lost: slots of ranks that were lost without a fault that explains it.
        console: console to print on.

    Returns:
        0 if faults struck and made no difference, 1 if not.
    """

    def say(good: bool, text: str) -> bool:
        console.print(text, style="green" if good else "red", markup=False, soft_wrap=True)
        return good

    checks = [
        _struck(effects, say),
        _ranks(lost, say),
        _steps(reference, run, say),
        _evaluations(reference, run, effects, say),
        _digests(reference, run, say, console),
    ]
    return 0 if all(checks) else 1


_Say = Callable[[bool, str], bool]


def _struck(effects: Sequence[Effect], say: _Say) -> bool:
    struck = sum(effect.struck for effect in effects)
    hint = "" if struck else ": nothing is shown; raise steps=, or try another --seed"
    return say(struck > 0, f"faults: {struck} of {len(effects)} struck{hint}")


def _ranks(lost: Sequence[int], say: _Say) -> bool:
    slots = ", ".join(str(slot) for slot in lost)
    return not lost or say(False, f"ranks: lost without a fault that explains it: slot {slots}")


def _steps(reference: Trained, run: Trained, say: _Say) -> bool:
    last = reference.result["step"]
    if list(run.steps) == list(range(1, last + 1)):
        return say(True, f"steps: each of {last} was committed once, and with it its samples")
    return say(False, f"steps: {len(run.steps)} rows for {last} steps")


def _evaluations(reference: Trained, run: Trained, effects: Sequence[Effect], say: _Say) -> bool:
    made, others = evaluated(reference.events), evaluated(run.events)
    if any(effect.struck and effect.blow.what == "directory" for effect in effects):
        gone = _gone_with_the_best(made, others)
        made, others = (
            tuple(r for r in rows if (r["step"], r["split"]) not in gone) for rows in (made, others)
        )
    names = "the run without faults", "the run with them"
    difference = first_difference(names, (made, others))
    if difference:
        return say(False, f"evaluations: differ first in {difference}")
    number = num_evaluations(made)
    same = f"evaluations: the same metrics in {count(number, 'evaluation')}"
    return not number or say(True, same)


def _gone_with_the_best(made: Sequence[Evaluation], others: Sequence[Evaluation]) -> set[Any]:
    """Steps and splits where a run had its last state to evaluate, and the other one its best.

    The checkpoint of the best state is gone with the run directory.
    """
    best = {(row["step"], row["split"]) for row in made if row.get("model_step") is not None}
    last = {(row["step"], row["split"]) for row in others if row.get("model_step") is None}
    return best & last


def _digests(reference: Trained, run: Trained, say: _Say, console: Console) -> bool:
    one, other = reference.result, run.result
    if any(one.get(key) != other.get(key) for key in _DIGESTS):
        say(False, "different: SHA-256 without faults, and with them")
        for sha256 in (one["params_sha256"], other["params_sha256"]):
            console.print(sha256, soft_wrap=True)
        return False
    say(True, "equal without and with faults: SHA-256")
    for key, of in _DIGESTS.items():
        if key in one:
            console.print(f"{one[key]}{of}", soft_wrap=True)
    return True
