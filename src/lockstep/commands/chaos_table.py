"""What faults did, from the rows that a run and the faults themselves have left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lockstep.commands.chaos_plan import Blow

Row = dict[str, Any]


@dataclass(frozen=True)
class Effect:
    """What came of a blow; times in seconds, None for what did not happen.

    Attributes:
        blow: what went wrong.
        struck: whether it did go wrong: the sitting may have ended before.
        noticed_s: from there until another rank noticed.
        regroup_s: from there until the survivors went on.
        resumed_s: from the blow to the next committed step.
        steps_lost: committed steps that had to be done again.
    """

    blow: Blow
    struck: bool
    noticed_s: float | None = None
    regroup_s: float | None = None
    resumed_s: float | None = None
    steps_lost: int | None = None


def effect_of(blow: Blow, strikes: Sequence[Row], rows: Sequence[Row]) -> Effect:
    """What a blow did in its sitting.

    Args:
        blow: what went wrong.
        strikes: the log of all faults of the sitting.
        rows: the events of the sitting.
    """
    keys = {(f.slot, f.step, f.moment, f.kind) for f in blow.faults}
    own = [s for s in strikes if (s["slot"], s["step"], s["moment"], s["kind"]) in keys]
    if not own:
        return Effect(blow, struck=False)
    time = min(s["time"] for s in own)
    after = [row for row in rows if row["time"] >= time]
    done = next((row["time"] - time for row in after if row["event"] == "StepDone"), None)
    if blow.ends_sitting:
        return Effect(blow, struck=True)
    if blow.what not in ("kill", "stop"):
        return Effect(blow, struck=True, resumed_s=done, steps_lost=0)
    slot = blow.faults[0].slot
    lost = next(
        (i for i, r in enumerate(after) if r["event"] == "RankLost" and r["slot"] == slot), None
    )
    if lost is None:
        return Effect(blow, struck=True, resumed_s=done)
    rest = after[lost:]
    recovered = next((r for r in rest if r["event"] == "Recovered"), None)
    if recovered is None:
        return Effect(blow, struck=True)
    noticed = max(recovered["time"] - recovered["seconds"] - time, 0.0)
    resumed = next((r["time"] - time for r in rest if r["event"] == "StepDone"), None)
    return Effect(blow, True, noticed, recovered["seconds"], resumed, 0)


def render(effects: Sequence[Effect]) -> Table:
    """A row for each blow."""
    table = Table()
    for name in ("#", "step"):
        table.add_column(name, justify="right")
    for name in ("fault", "moment", "victim"):
        table.add_column(name)
    for name in ("noticed", "regrouped in", "next step after", "steps lost"):
        table.add_column(name, justify="right")
    for number, effect in enumerate(effects, 1):
        faults = effect.blow.faults
        victim = f"slot {faults[0].slot}" if len(faults) == 1 else "all"
        moment = faults[0].moment + (f" + {1e3 * d:.1f} ms" if (d := faults[0].delay_s) else "")
        table.add_row(
            str(number),
            str(effect.blow.step),
            effect.blow.what,
            moment,
            victim if effect.struck else f"{victim} (was not struck)",
            _milliseconds(effect.noticed_s),
            _milliseconds(effect.regroup_s),
            _milliseconds(effect.resumed_s),
            "" if effect.steps_lost is None else str(effect.steps_lost),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"
