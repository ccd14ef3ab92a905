"""The diagnosis of a run: all causes by their cost, and those that have ended it or its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.engine.call_history import difference, listed, waits
from lockstep.engine.events import Failed, RankLost, Recovered
from lockstep.observe import text
from lockstep.observe.reading.diagnosis import Calls, Cause, NewestSession, percent
from lockstep.observe.reading.diagnosis.slowness import slowness
from lockstep.observe.reading.history import History
from lockstep.observe.reading.listing import Summary

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in ([^\n]+)')
_LIBRARIES = ("site-packages", "/lockstep/", "/lib/python", "<frozen")
_CURRENT = "Current thread "
"""Begins the stack of the thread that was interrupted."""
_COMMAND = re.compile(r"/bin/[^/]+$")
_SAID = {
    "NonFiniteError": ("not_finite", "the loss or its gradient became NaN or infinite"),
    "DivergenceError": ("divergence", "ranks no longer held the same bits"),
    "TaskFailure": ("task_error", "the task's own code raised an exception"),
    "TaskError": ("task_error", "the task does something that cannot work"),
    "DataError": ("data_error", "data could not be read"),
    "RankFailure": ("rank_failure", "ranks were lost, and the others could not go on"),
    "ConfigError": ("config_error", "the config does not fit"),
    "CheckpointError": ("checkpoint_error", "a checkpoint could not be read or written"),
    "LaunchError": ("launch_error", "ranks could not be started, or could not find one another"),
    "RunDirectoryError": ("run_directory", "the run directory could not be used"),
    "EnvironError": ("environment", "the machine does not give what the run needs"),
}
_HANG = 0.3
"""The least weight of a hang, however short it was."""
_ADVICE = {
    "not_finite": "lower lr, set clip_norm, or look at the data of that step",
    "divergence": "suspect the memory or the processor of the rank that is named; run "
    "`lockstep runs compare` with a run of the same config",
    "rank_failure": "`lockstep resume` goes on; --replace has new processes take part",
}


_LEAST = 0.15
"""The least weight of a cause that is reported."""


def causes(summary: Summary, history: History, calls: Calls) -> list[Cause]:
    """What has ended a run or cost it time, the heaviest first; effects of others are left out.

    Args:
        summary: summary of the run.
        history: its events.
        calls: the newest calls of its ranks, as from `calls_of`.
    """
    session = NewestSession(history, summary.config, summary.state, calls)
    found = [c for c in (*endings(session), *slowness(session)) if c.weight >= _LEAST]
    explained = {name for cause in found for name in cause.explains}
    left = [cause for cause in found if cause.name not in explained]
    return sorted(left, key=lambda cause: cause.weight, reverse=True)


def diagnosis_lines(summary: Summary, history: History, found: Sequence[Cause]) -> Iterator[str]:
    """A diagnosis as text: of each cause the sentence, the evidence and the advice."""
    if not found:
        yield healthy(summary, history)
    for number, cause in enumerate(found):
        if number:
            yield ""
        yield cause.headline
        yield from (f"  {line}" for line in cause.evidence)
        yield f"  -> {cause.advice}"


def healthy(summary: Summary, history: History) -> str:
    """The diagnosis of a run without causes."""
    session = NewestSession(history, summary.config, summary.state, Calls())
    if not session.workers:
        return f"nothing to judge by yet: no rank has reported a step (the run is {summary.state})"
    return (
        f"nothing stands out: ranks compute for {percent(session.share('compute_s'))} and exchange "
        f"for {percent(session.share('communication_s'))} of the time"
    )


def endings(session: NewestSession) -> Iterator[Cause]:
    """The causes that have ended the run or ranks of it."""
    end = session.history.end
    if isinstance(end, Failed):
        yield _failure(end, session.history.step)
    elif session.state == "killed":
        yield Cause(
            "killed",
            1.0,
            "all processes ended without a word; "
            f"{text.count(session.history.step, 'step')} had been reported",
            ["there is no result, and no error"],
            "look for the out-of-memory killer in `dmesg`, or a time limit of the batch system; "
            "`lockstep resume` goes on",
        )
    lost = session.lost
    hung = [one for one in lost if one.reason]
    for one in hung[:1]:
        yield _hang(session, one, len(hung))
    # A rank that hung and still has a file of calls explains the waits; after a recovery the files
    # are moved away.
    if not any(one.slot in session.calls.logs for one in hung):
        yield from _standstill(session)
    killed = [one for one in lost if not one.reason]
    if killed:
        yield _losses(session, killed)


def _failure(end: Failed, step: int) -> Cause:
    name, sentence = _SAID.get(end.error, ("failed", "the run failed"))
    first = end.message.strip().splitlines() or [""]
    shown = [first[0], *first[-1:]] if len(first) > 1 else first
    advice = _ADVICE.get(name, "read the message; `lockstep resume` goes on once that is mended")
    return Cause(
        name, 1.0, f"{sentence}; {text.count(step, 'step')} had been reported", shown, advice
    )


def _hang(session: NewestSession, lost: RankLost, count: int) -> Cause:
    why, _, stack = lost.reason.partition("; its Python stack:")
    is_stopped = why.startswith("was stopped by a signal")
    evidence = [f"after step {lost.step:,} its watchdog ended it, since it {why}"]
    place = ""
    for path, line, function in [] if is_stopped else _frames(stack)[:1]:
        evidence.append(f"it stood at {path}:{line}, in {function}")
        place = f", at {Path(path).name}:{line} in {function}"
    if count > 1:
        evidence.append(f"{count} processes hung altogether")
    waited = session.config.get("hang_timeout_s")
    is_known = isinstance(waited, (int, float)) and waited > 0
    part = min(0.95, float(waited or 0.0) / session.seconds) if is_known else None
    return Cause(
        "hang",
        max(_HANG, part or 0.0),
        _sentence(lost, "was stopped by a signal" if is_stopped else "hung", place),
        evidence,
        f"{_advice(is_stopped, bool(place))}; hang_timeout_s says how long others wait",
        explains=("lost_ranks", "latency", "bandwidth", "slow_rank"),
        lost=part,
    )


def _frames(stack: str) -> list[tuple[str, str, str]]:
    """File, line and function of the user's frames in a stack, the newest call first.

    If no frame is the user's, all of them. Only the thread that was interrupted counts, which is
    the one that trains: others wait all the time.
    """
    frames: list[tuple[str, str, str]] = _FRAME.findall(
        stack.rpartition(_CURRENT)[2].partition("\n\n")[0]
    )
    # The script of a command only starts it.
    user_frames = [f for f in frames if not any(part in f[0] for part in _LIBRARIES)]
    return [f for f in user_frames if not _COMMAND.search(f[0])] or frames


def _advice(is_stopped: bool, is_placed: bool) -> str:
    if is_stopped:
        return (
            "look for who has stopped it: a debugger, `kill -STOP`, or a batch system that "
            "suspends jobs"
        )
    return "look at that line" if is_placed else "look at what its host did then"


def _sentence(lost: RankLost, event: str, place: str) -> str:
    """Which rank hung and where, and which ranks waited in which call, if known."""
    who = f"rank {lost.rank} (slot {lost.slot}) {event}"
    if not lost.reached:
        return f"{who}, and all others waited for it"
    waited = f"; {lost.waiting}" if lost.waiting else ""
    return f"{who} {lost.reached}{place}{waited}"


def _standstill(session: NewestSession) -> Iterator[Cause]:
    """Ranks that wait in calls, though none is known to hang."""
    # A rank that waited for a lost one no longer waits: its call has failed.
    calls = session.calls.logs.items()
    logs = {slot: log for slot, log in calls if log.stuck is None or not log.stuck.has_failed}
    waiting = waits(logs)
    if not waiting:
        return
    where = ", ".join(f"{listed(ranks)} in {call}" for ranks, call in waiting[:4])
    known = {log.rank for log in logs.values() if log.stuck is not None}
    size = max(log.size for log in logs.values())
    others = [rank for rank in range(min(size, len(known) + 8)) if rank not in known]
    evidence = [f"{listed(others)}: not known to wait"] if others else []
    differ = difference(logs)
    yield Cause(
        "standstill",
        0.95,
        f"ranks have made different calls, and wait for each other: {differ}"
        if differ
        else f"{where}: waiting for the others",
        [where, *evidence] if differ else evidence,
        "look for a call, or a layer that makes one, behind a condition that is not the same on "
        "all ranks"
        if differ
        else "hang_timeout_s after the beginning, the watchdog of a rank that hangs ends it and "
        "says where it stood",
        explains=("latency", "bandwidth", "slow_rank"),
    )


def _losses(session: NewestSession, killed: list[RankLost]) -> Cause:
    recovered = session.events(Recovered)
    spent = sum(one.seconds for one in recovered)
    ranks = ", ".join(f"rank {one.rank} at step {one.step:,}" for one in killed[:4])
    more = f" and {len(killed) - 4} more" if len(killed) > 4 else ""
    fewer = 1.0 - len(session.history.living) / max(1, session.history.num_at_start)
    return Cause(
        "lost_ranks",
        min(0.9, max(spent / session.seconds, fewer)),
        f"{text.count(len(killed), 'process', 'processes')} died while the run went on",
        [f"{ranks}{more}", f"going on took {spent:.2f} s altogether"],
        "look for the out-of-memory killer in `dmesg`; --replace has new processes step in",
        explains=("imbalance",),
        lost=min(1.0, spent / session.seconds),
    )
