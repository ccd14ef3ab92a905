"""The causes of a run, by what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.reading.diagnosis.calls import Calls
from lockstep.reading.diagnosis.cause import Cause, percent
from lockstep.reading.diagnosis.endings import endings
from lockstep.reading.diagnosis.facts import Facts
from lockstep.reading.diagnosis.slowness import slowness
from lockstep.reading.history import History
from lockstep.reading.listing import Summary

_LEAST = 0.15
"""A cause that weighs less is not worth a word."""


def causes(summary: Summary, history: History, calls: Calls) -> list[Cause]:
    """What has ended a run or cost it time, the heaviest first; effects of others are left out.

    Args:
        summary: of the run.
        history: what its events tell.
        calls: of its ranks, as `calls_of` reads them.
    """
    facts = Facts(history, summary.config, summary.state, calls)
    found = [c for c in (*endings(facts), *slowness(facts)) if c.weight >= _LEAST]
    explained = {name for cause in found for name in cause.explains}
    left = [cause for cause in found if cause.name not in explained]
    return sorted(left, key=lambda cause: cause.weight, reverse=True)


def told(summary: Summary, history: History, found: Sequence[Cause]) -> Iterator[str]:
    """Lines for people: the sentence first, the evidence after it."""
    if not found:
        yield _healthy(summary, history)
        return
    for number, cause in enumerate(found):
        cost = "" if cause.lost is None else f" ({percent(cause.lost)} of the time)"
        yield f"{cause.sentence}{cost}"
        yield from (f"  {line}" for line in cause.evidence)
        yield f"  -> {cause.advice}"
        if number < len(found) - 1:
            yield ""


def _healthy(summary: Summary, history: History) -> str:
    facts = Facts(history, summary.config, summary.state, Calls())
    if not facts.workers:
        return f"nothing to judge by yet: no rank has reported a step (the run is {summary.state})"
    return (
        f"nothing stands out: ranks compute for {percent(facts.share('compute_s'))} and exchange "
        f"for {percent(facts.share('communication_s'))} of the time"
    )
