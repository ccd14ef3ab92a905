"""What is known of a watched run in short texts: for the screen, for scripts and for logs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.events import Event, Failed, Finished, Improved, RankLost, RunStarted, Warned
from lockstep.observe import text
from lockstep.observe.monitor.watch import Watch, Watched
from lockstep.observe.reading.diagnosis.facts import Cause, percent
from lockstep.observe.reading.differences import cost_of_run
from lockstep.observe.reading.history import KINDS, Happening, History, Process
from lockstep.observe.reading.listing import Summary
from lockstep.observe.step_costs import step_time
from lockstep.observe.text import printable

STYLES = {
    "running": "green", "living": "green", "completed": "cyan", "joining rank": "cyan",
    "stopped": "yellow", "failed": "red", "killed": "red", "lost": "red",
}  # fmt: skip
"""Styles of `rich` for states of runs and ranks; others have none."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class RankRow:
    """A process of the newest session, as it is shown.

    Attributes:
        rank: its number now.
        slot: what it keeps when ranks are numbered anew.
        state: `living`, `joiner` (it came after the start), `lost`, or `ended` with the run.
        host: where it is.
        pid: number of the process there.
        num_microbatches: how many it computes in a step.
        recent: part of its time by kind of work (`KINDS`) in the newest report that was seen; empty
            before one.
        all: the same of the whole session.
        peak_bytes: the most memory that it has had.
        reported: Unix time of its newest report; 0.0 before the first.
        reason: why its watchdog ended it; empty if it did not.
    """

    rank: int
    slot: int
    state: str
    host: str
    pid: int
    num_microbatches: float
    recent: tuple[float, ...]
    all: tuple[float, ...]
    peak_bytes: int
    reported: float
    reason: str


class Looks:
    """What each process had spent its time with at the last look, so that the newest can be told.

    A process that has reported nothing since keeps its newest shares.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, float], tuple[float, ...]] = {}
        self._recent: dict[tuple[int, float], tuple[float, ...]] = {}

    def recent(self, process: Process) -> tuple[float, ...]:
        """Parts of the time between the last two looks at which there was something new."""
        key = (process.joined.slot, process.since)
        now = tuple(process.seconds[kind] for kind in KINDS)
        before = self._before.get(key, (0.0,) * len(KINDS))
        if now != before:
            self._before[key] = now
            spent = [max(0.0, new - old) for new, old in zip(now, before, strict=True)]
            self._recent[key] = _parts(spent)
        return self._recent.get(key, ())


def rank_rows(history: History, is_running: bool, looks: Looks) -> list[RankRow]:
    """The processes of the newest session: the living by their ranks, then those that were lost.

    Args:
        history: what the run's events tell.
        is_running: whether the run goes on.
        looks: what was seen before; it is brought up to date.
    """
    start = _start_of_session(history)
    rows = []
    for process in sorted(history.processes, key=lambda p: (p.until is not None, p.rank)):
        if process.until is not None:
            state = "lost"
        elif not is_running:
            state = "ended"
        else:
            state = "joining rank" if start is not None and process.since > start else "living"
        rows.append(
            RankRow(
                rank=process.rank,
                slot=process.joined.slot,
                state=state,
                host=process.joined.host,
                pid=process.joined.pid,
                num_microbatches=process.num_microbatches,
                recent=looks.recent(process),
                all=_parts([process.seconds[kind] for kind in KINDS]),
                peak_bytes=int(process.times.peak_bytes),
                reported=process.reported,
                reason=process.reason.partition(";")[0],
            )
        )
    return rows


def ranks_alive(history: History, summary: Summary) -> str:
    """How many ranks there are of those that were asked for: `3 of 4 ranks`."""
    asked = history.plan.world_size if history.plan else summary.ranks
    living = len(history.living) if summary.state == "running" else 0
    if not asked:
        return "no ranks yet"
    if summary.state == "running" and history.processes:
        return f"{living} of {text.count(asked, 'rank')}"
    return text.count(asked, "rank")


def steps(summary: Summary) -> str:
    """`step 5/100`."""
    total = f"/{summary.total_steps:,}" if summary.total_steps else ""
    return f"{summary.step:,}{total}"


def left(summary: Summary, now: float) -> str:
    """The time that a run still takes, `0:01:05`; empty if it is not known.

    Args:
        summary: of the run.
        now: Unix time.
    """
    if summary.left_s is None or summary.state != "running":
        return ""
    return text.clock(max(0.0, summary.left_s - max(0.0, now - summary.newest)))


def bar(summary: Summary, width: int) -> str:
    """A bar of `width` columns for the part of the steps that are done; blank without a plan."""
    if not summary.total_steps:
        return " " * width
    eighths = round(8 * width * min(1.0, summary.step / summary.total_steps))
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width, "░")


def newest_loss(summary: Summary) -> str:
    """The newest loss of the training, then that of another split."""
    found = [("train/loss", summary.metrics.get("train/loss"))]
    found += [
        (k, v) for k, v in summary.metrics.items() if k.endswith("/loss") and k != found[0][0]
    ]
    values = [text.number(value) for _, value in found[:2] if value is not None]
    return " | ".join(values)


def cost_of_steps(history: History, summary: Summary) -> str:
    """`a step 5.9 ms; 6.1 ms predicted by plan.json`; empty while too little was measured."""
    told = step_time(cost_of_run(summary, history))
    return told and shown(f"a step {told}")


def told_event(happening: Happening) -> str:
    """One line for what has happened."""
    event = happening.event
    if isinstance(event, RunStarted):
        verb = "goes on with another rank 0" if event.continued else "started"
        ranks = text.count(event.world_size, "rank")
        line = f"step {event.step:,}: {verb} on {ranks} ({event.launcher}, {event.transport})"
    elif isinstance(event, Finished):
        reason = f": {event.reason}" if event.reason else ""
        line = f"{text.outcome(None, event)}{reason}"
    elif isinstance(event, Failed):
        line = f"step {event.step:,}: {event.error}: {event.message}"
    else:
        line = text.line(event)
    return shown(line)


def event_style(event: Event) -> str:
    """A style of `rich` for an event's line."""
    if isinstance(event, Failed):
        return "red"
    if isinstance(event, Warned | RankLost):
        return "yellow"
    return "green" if isinstance(event, Improved | Finished) else ""


def told_cause(cause: Cause) -> list[str]:
    """A cause of a diagnosis: the sentence with its cost, and the advice."""
    cost = "" if cause.lost is None else f" ({percent(cause.lost)} of the time)"
    return [shown(f"{cause.sentence}{cost}"), shown(f"  -> {cause.advice}")]


def told_shares(parts: Sequence[float]) -> list[str]:
    """Parts of a time as `75%`; `-` where nothing was measured."""
    return [f"{part:.0%}" for part in parts] or ["-"] * len(KINDS)


def name_of(path: Path, folders: Sequence[Path]) -> str:
    """The path from the only folder that is watched, or as it was given."""
    if len(folders) == 1 and path != folders[0]:
        return shown(os.path.relpath(path, folders[0]))
    return shown(str(path))


def shown(value: str) -> str:
    """A text of one line that a terminal can show, whatever a name or a message holds.

    Control signs and bytes that are no UTF-8 come as escapes.
    """
    line = printable(value.replace("\t", " ")).replace("\n", " ⏎ ")
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


def _parts(seconds: Sequence[float]) -> tuple[float, ...]:
    total = sum(seconds)
    return tuple(part / total for part in seconds) if total > 0 else ()


def _start_of_session(history: History) -> float | None:
    """When the ranks of the newest session were complete."""
    for happening in history.happenings[history.first_of_session :]:
        if isinstance(happening.event, RunStarted) and not happening.event.continued:
            return happening.time
    return None


_MOST_EVENTS = 10
_BAR = 10


def picture(watch: Watch, now: float) -> Iterator[str]:
    """A line for each run; of a single run also ranks, diagnosis and newest events.

    Args:
        watch: the runs.
        now: Unix time.
    """
    runs = list(watch.runs.values())
    if not runs:
        yield f"no runs in {shown(', '.join(map(str, watch.folders)))} yet"
    rows = [_cells(run, watch, now) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(f"{cell:<{room}}" for cell, room in zip(cells, widths, strict=True))
        yield line.rstrip()
    for run in runs:
        for problem in run.summary.problems:
            yield f"{name_of(run.path, watch.folders)}: {shown(problem)}"
    if len(runs) == 1:
        yield from _details(runs[0])


def _cells(run: Watched, watch: Watch, now: float) -> list[str]:
    summary = run.summary
    time_left, loss = left(summary, now), newest_loss(summary)
    return [
        name_of(run.path, watch.folders),
        shown(summary.task),
        summary.state,
        f"step {steps(summary)}",
        time_left and f"left {time_left}",
        loss and f"loss {loss}",
        text.count(summary.ranks, "rank") if summary.ranks else "",
        shown(" ".join(summary.tags)),
        summary.sha256 and f"SHA-256 {shown(summary.sha256)}",
    ]


def _details(run: Watched) -> Iterator[str]:
    history = run.history
    for problem in (run.problem, *history.problems):
        if problem:
            yield shown(problem)
    took = cost_of_steps(history, run.summary)
    if took:
        yield took
    is_running = run.summary.state == "running"
    for row in rank_rows(history, is_running, Looks()):
        shares = zip(text.KINDS_OF_WORK, told_shares(row.all), strict=True)
        yield (
            f"rank {row.rank} {row.state}: {shown(row.host)} (pid {row.pid})  "
            + "  ".join(map(" ".join, shares))
        )
    for cause in run.causes():
        yield from told_cause(cause)
    for happening in history.happenings[-_MOST_EVENTS:]:
        yield told_with_time(happening)


def told_with_time(happening: Happening) -> str:
    """An event's line behind its local time."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(happening.time))
    return f"{clock} {told_event(happening)}"


class Log:
    """A line for each state that a run comes to, and for each of its events.

    Of runs that have ended before, only their state is told.

    Args:
        tell: takes a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._states: dict[Path, str] = {}
        self._newest: dict[Path, float] = {}

    def __call__(self, watch: Watch, changed: Sequence[Watched]) -> None:
        """Tell what is new."""
        for run in changed:
            name, state = name_of(run.path, watch.folders), run.summary.state
            is_new = run.path not in self._states
            if self._states.get(run.path) != state:
                self._states[run.path] = state
                self._tell(f"{name}: {state} at step {steps(run.summary)}")
            if is_new:
                self._newest[run.path] = run.summary.newest
            elif run.summary.newest > self._newest[run.path]:
                self._tell_events(run, name)
        for path in self._states.keys() - watch.runs.keys():
            self._tell(f"{name_of(path, watch.folders)}: is gone")
            del self._states[path], self._newest[path]

    def _tell_events(self, run: Watched, name: str) -> None:
        newest = self._newest[run.path]
        new = [h for h in run.history.happenings if h.time > newest]
        for happening in new:
            self._tell(f"{name}: {told_with_time(happening)}")
        self._newest[run.path] = max((h.time for h in new), default=newest)
