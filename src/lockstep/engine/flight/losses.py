"""Events of processes that were lost, with what their newest calls tell."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.events import RankLost
from lockstep.engine.flight.story import Logs, reached, waiting


def losses(
    step: int, lost: Mapping[int, int], reasons: Mapping[int, str], logs: Logs
) -> list[RankLost]:
    """An event for each process that was lost.

    Args:
        step: committed steps.
        lost: the rank of each, by slot.
        reasons: why its watchdog ended it, by slot; empty if it did not.
        logs: the newest calls that are known, by slot.
    """
    hung = {slot for slot in lost if reasons[slot]}
    return [_loss(step, slot, rank, reasons[slot], logs, hung) for slot, rank in lost.items()]


def unreported(logs: Logs, reasons: Mapping[int, str]) -> list[RankLost]:
    """Processes that have hung, and after whose end the others could not go on.

    Args:
        logs: the newest calls that are known, by slot.
        reasons: why watchdogs ended processes, by slot.
    """
    hung = {slot for slot in logs if reasons.get(slot)}
    return [
        _loss(logs[slot].step, slot, logs[slot].rank, reasons[slot], logs, hung)
        for slot in sorted(hung)
    ]


def _loss(step: int, slot: int, rank: int, reason: str, logs: Logs, hung: set[int]) -> RankLost:
    if slot not in hung or slot not in logs:
        return RankLost(step=step, slot=slot, rank=rank, reason=reason)
    return RankLost(
        step=step,
        slot=slot,
        rank=rank,
        reason=reason,
        reached=reached(logs[slot]),
        waiting=waiting(logs, hung),
    )
