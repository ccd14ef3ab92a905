"""What the newest calls of ranks tell: who hung, after which call, and who waited in which one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby

from lockstep.comm.call_records import Call, CallLog

_MOST = 6
"""Ranks that are listed; of more, it is said how many they are."""

_ALIKE = ("all_gather", "broadcast")
"""Calls after which all ranks have the same number of bytes."""

Logs = Mapping[int, CallLog]
"""What is known of processes, by slot."""


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words: `rank 1`, `ranks 0, 2 and 3`."""
    shown = [f"{rank:,}" for rank in sorted(ranks)]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    if len(shown) > _MOST:
        shown = [*shown[: _MOST - 1], f"{len(shown) - _MOST + 1:,} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def named(call: Call, log: CallLog) -> str:
    """A call in words: `call 1,234 (all_gather)`."""
    ranks = log.ranks(call.group)
    if not call.is_message:
        of = "" if call.group == 0 else f" of {listed(ranks)}" if ranks else " of a subgroup"
        return f"call {call.number:,} ({call.kind}){of}"
    if call.peer < 0:
        return "the end of a message that it sent"
    if ranks is None or call.peer >= len(ranks):
        peer = f"place {call.peer:,} of a subgroup"
    else:
        peer = f"rank {ranks[call.peer]:,}"
    return f"message {call.number:,} {'to' if call.kind == 'send' else 'from'} {peer}"


def reached(log: CallLog) -> str:
    """Where a process stood that has hung: `in step 57, after call 1,234 (all_gather)`."""
    step = f"in step {log.step + 1:,}"
    if log.stuck is not None:
        return f"{step}, in {named(log.stuck, log)}"
    if log.calls:
        return f"{step}, after {named(log.calls[-1], log)}"
    return f"{step}, before its first call"


def waits(logs: Logs, apart: Collection[int] = ()) -> list[tuple[list[int], str]]:
    """Who waits in which call.

    Args:
        logs: what is known of processes; those of groups of other sizes are left out.
        apart: slots of those that hang.

    Returns:
        Ranks that wait in the same call, and the call in words.
    """
    sizes = [logs[slot].size for slot in apart if slot in logs] or [
        log.size for log in logs.values()
    ]
    found: list[tuple[str, int]] = []
    for slot, log in logs.items():
        if slot not in apart and log.size == sizes[0] and log.stuck is not None:
            found.append((named(log.stuck, log), log.rank))
    groups = groupby(sorted(found), key=lambda pair: pair[0])
    pairs = [(sorted(rank for _, rank in members), name) for name, members in groups]
    return sorted(pairs)


def waiting(logs: Logs, hung: Collection[int]) -> str:
    """Who waited for those that hung: `ranks 0 and 2 waited for it in call 1,235 (all_gather)`.

    Args:
        logs: what is known of processes.
        hung: slots of those that hung.

    Returns:
        Empty if nobody is known to have waited.
    """
    parts = [f"{listed(ranks)} waited for it in {call}" for ranks, call in waits(logs, hung)]
    return ", ".join(parts[:_MOST])


def difference(logs: Logs) -> str:
    """The first call that ranks of a group have made differently; empty if they have not.

    Args:
        logs: what is known of processes.
    """
    groups: dict[tuple[int, int, tuple[int, ...]], dict[int, dict[int, Call]]] = {}
    for log in logs.values():
        for call in log.until_stuck:
            ranks = log.ranks(call.group)
            # All members of a group are told apart by its first and last rank, which takes no time.
            if ranks is None or call.is_message:
                continue
            key = (log.size, call.group, (ranks[0], ranks[-1], len(ranks)))
            groups.setdefault(key, {}).setdefault(log.rank, {})[call.number] = call
    for _, calls in sorted(groups.items()):
        said = _first_difference(calls)
        if said:
            return said
    return ""


def _first_difference(calls: Mapping[int, Mapping[int, Call]]) -> str:
    """The first number of a call that is another one on some rank.

    Args:
        calls: for each rank of a group, its calls by number.
    """
    first = max(min(numbers) for numbers in calls.values())
    last = min(max(numbers) for numbers in calls.values())
    for number in range(first, last + 1):
        by_what: dict[str, list[int]] = {}
        for rank, numbers in calls.items():
            if number in numbers:
                by_what.setdefault(_what(numbers[number]), []).append(rank)
        if len(by_what) > 1:
            parts = sorted((sorted(ranks), what) for what, ranks in by_what.items())
            return f"call {number:,} is " + ", ".join(
                f"{what} on {listed(ranks)}" for ranks, what in parts[:_MOST]
            )
    return ""


def _what(call: Call) -> str:
    return f"{call.kind} of {call.taken:,} bytes" if call.kind in _ALIKE else call.kind
