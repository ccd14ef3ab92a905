"""The effects of faults, and whether they have changed the result of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lockstep.cli.prove.chaos_plan import Incident, What
from lockstep.cli.prove.repeated import Row as Evaluation
from lockstep.cli.prove.repeated import evaluated, first_different_evaluation, num_evaluations
from lockstep.observe.text import count

Row = dict[str, Any]

_VICTIMS: dict[What, str] = {
    "job": "all",
    "corrupt": "all",
    "reader": "reader",
    "directory": "run directory",
}
"""Victims that are not a single process."""


@dataclass(frozen=True)
class Effect:
    """The effect of a incident; times in seconds, None for what did not happen.

    Attributes:
        incident: incident whose effect this is.
        struck: whether the incident happened; the session may have ended before.
        time: time of the incident in Unix seconds.
        noticed_s: time from the incident until another rank noticed it.
        regroup_s: time from then until the survivors went on.
        resumed_s: time from the incident to the next committed step.
        steps_lost: number of committed steps that were repeated.
    """

    incident: Incident
    struck: bool
    time: float = 0.0
    noticed_s: float | None = None
    regroup_s: float | None = None
    resumed_s: float | None = None
    steps_lost: int | None = None


def effect_of(incident: Incident, strikes: Sequence[Row], rows: Sequence[Row]) -> Effect:
    """The effect of a incident in its session.

    Args:
        incident: incident that was planned.
        strikes: rows of the log of all faults of the session.
        rows: events of the session, in order.
    """
    keys = {(f.slot, f.step, f.moment, f.kind) for f in incident.faults}
    own = [s for s in strikes if (s["slot"], s["step"], s["moment"], s["kind"]) in keys]
    if not own:
        return Effect(incident, struck=False)
    time = min(s["time"] for s in own)
    after = [row for row in rows if row["time"] >= time]
    effect = Effect(incident, True, time)
    if incident.ends_session:
        return effect
    if incident.what not in ("kill", "stop", "edit"):
        return replace(effect, resumed_s=_next_step(after, time), steps_lost=0)
    slot = incident.faults[0].slot
    lost = next(
        (i for i, r in enumerate(after) if r["event"] == "RankLost" and r["slot"] == slot), None
    )
    recovered = next((r for r in after[lost:] if r["event"] == "Recovered"), None)
    if lost is None or recovered is None:
        return effect
    return replace(
        effect,
        noticed_s=max(recovered["time"] - recovered["seconds"] - time, 0.0),
        regroup_s=recovered["seconds"],
        resumed_s=_next_step(after[lost:], time),
        steps_lost=max(after[lost]["step"] - recovered["step"], 0),
    )


def lost_unexplained(
    incidents: Sequence[Incident], rows: Sequence[Row], num_ranks: int
) -> list[int]:
    """The slots of ranks that were lost in a session though no fault was to end them.

    Joining ranks are left out: one that would train something else leaves by itself.
    """
    ended = {
        fault.slot for incident in incidents if incident.ends_ranks for fault in incident.faults
    }
    lost = {int(row["slot"]) for row in rows if row["event"] == "RankLost"}
    return sorted(slot for slot in lost - ended if slot < num_ranks)


def started_again(effect: Effect, before: Sequence[Row], rows: Sequence[Row]) -> Effect:
    """The effect of a incident that ended a session, with what it has cost if it was struck.

    Args:
        effect: effect without its cost.
        before: events of that session.
        rows: events of the next session.
    """
    if not effect.struck:
        return effect
    reached = max((r["step"] for r in before if r["event"] == "StepDone"), default=0)
    start = next((r["step"] for r in rows if r["event"] == "RunStarted"), reached)
    return replace(
        effect, resumed_s=_next_step(rows, effect.time), steps_lost=max(reached - start, 0)
    )


def _next_step(rows: Sequence[Row], time: float) -> float | None:
    return next((r["time"] - time for r in rows if r["event"] == "StepDone"), None)


def render(effects: Sequence[Effect]) -> Table:
    """A table with a row for each incident."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("#", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fault", no_wrap=True)
    for name in ("moment", "victim"):
        table.add_column(name)
    # Broken here, or the columns would be too wide for 80 columns in all.
    for name in ("noticed", "regrouped\nin", "next step\nafter", "steps\nlost"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, effect in enumerate(effects, 1):
        faults = effect.incident.faults
        victim = _VICTIMS.get(effect.incident.what, f"slot {faults[0].slot}")
        moment = faults[0].moment + (f" + {1e3 * d:.1f} ms" if (d := faults[0].delay_s) else "")
        table.add_row(
            str(number),
            str(effect.incident.step),
            effect.incident.what,
            moment,
            victim if effect.struck else f"{victim} (was not struck)",
            _milliseconds(effect.noticed_s),
            _milliseconds(effect.regroup_s),
            _milliseconds(effect.resumed_s),
            "" if effect.steps_lost is None else str(effect.steps_lost),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


_DIGESTS = {"params_sha256": "", "carry_sha256": " of the carry",
            "tables_sha256": " of the rows of tables"}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a finished run has written.

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
    """Print which results are equal and which are not.

    Args:
        reference: result of the run without faults.
        run: result of the run with faults.
        effects: effects of the faults.
        lost: slots of ranks that were lost without a fault that explains it.
        console: console to print on.

    Returns:
        0 if faults struck and changed nothing, 1 if not.
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
    if any(effect.struck and effect.incident.what == "directory" for effect in effects):
        gone = _gone_with_the_best(made, others)
        made, others = (
            tuple(r for r in rows if (r["step"], r["split"]) not in gone) for rows in (made, others)
        )
    names = "the run without faults", "the run with them"
    difference = first_different_evaluation(names, (made, others))
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
