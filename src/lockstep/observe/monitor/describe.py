"""What is known of a watched run as short texts: for the screen, for scripts and for logs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.events import Event, Failed, Finished, Improved, RankLost, RunStarted, Warned
from lockstep.observe import text
from lockstep.observe.monitor.watch import Watch, Watched
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
_MAX_EVENTS = 10


def overview(watch: Watch, now: float) -> Iterator[str]:
    """A line for each run; of a single run also its ranks, diagnosis and newest events.

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
    yield from (shown(problem) for problem in (run.problem, *history.problems) if problem)
    if cost := cost_of_steps(history, run.summary):
        yield cost
    for row in rank_rows(history, run.summary.state == "running", RecentShares()):
        joined = row.process.joined
        shares = zip(text.KINDS_OF_WORK, percentages(row.all), strict=True)
        yield (
            f"rank {row.process.rank} {row.state}: {shown(joined.host)} (pid {joined.pid})  "
            + "  ".join(map(" ".join, shares))
        )
    for cause in run.causes():
        yield from (shown(cause.headline), shown(f"  -> {cause.advice}"))
    yield from map(_timed_line, history.happenings[-_MAX_EVENTS:])


class Log:
    """Writes a line for each new state of a run, and for each of its events.

    Of runs that have ended before, only the state is written.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._states: dict[Path, str] = {}
        self._newest: dict[Path, float] = {}

    def __call__(self, watch: Watch, changed: Sequence[Watched]) -> None:
        """Write what is new."""
        for run in changed:
            name, state = name_of(run.path, watch.folders), run.summary.state
            is_new = run.path not in self._states
            if self._states.get(run.path) != state:
                self._states[run.path] = state
                self._write(f"{name}: {state} at step {steps(run.summary)}")
            if is_new:
                self._newest[run.path] = run.summary.newest
            elif run.summary.newest > self._newest[run.path]:
                since = self._newest[run.path]
                new = [h for h in run.history.happenings if h.time > since]
                for happening in new:
                    self._write(f"{name}: {_timed_line(happening)}")
                self._newest[run.path] = max((h.time for h in new), default=since)
        for path in self._states.keys() - watch.runs.keys():
            self._write(f"{name_of(path, watch.folders)}: is gone")
            del self._states[path], self._newest[path]


def _timed_line(happening: Happening) -> str:
    """An event's line behind its local time."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(happening.time))
    return f"{clock} {event_line(happening.event)}"


def event_line(event: Event) -> str:
    """One line for an event."""
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
    """The style of `rich` for an event's line."""
    if isinstance(event, Failed):
        return "red"
    if isinstance(event, Warned | RankLost):
        return "yellow"
    return "green" if isinstance(event, Improved | Finished) else ""


@dataclass(frozen=True)
class RankRow:
    """A process of the newest session, as it is shown.

    Attributes:
        process: the process.
        state: `living`, `joining rank` (it joined after the start), `lost`, or `ended` with the
            run.
        recent: shares of the time by kind of work (`KINDS`) in the newest report that was seen;
            empty before the first one.
        all: the same over the whole session.
    """

    process: Process
    state: str
    recent: tuple[float, ...]
    all: tuple[float, ...]


class RecentShares:
    """What each process has spent its time on since the look before.

    A process that has reported nothing since keeps its newest shares.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, float], tuple[float, ...]] = {}
        self._recent: dict[tuple[int, float], tuple[float, ...]] = {}

    def of(self, process: Process) -> tuple[float, ...]:
        """Shares of the time between the last two looks with something new."""
        key = (process.joined.slot, process.since)
        now = tuple(process.seconds.values())
        before = self._before.get(key, (0.0,) * len(KINDS))
        if now != before:
            self._before[key] = now
            spent = [max(0.0, new - old) for new, old in zip(now, before, strict=True)]
            self._recent[key] = _shares(spent)
        return self._recent.get(key, ())


def rank_rows(history: History, is_running: bool, recent: RecentShares) -> list[RankRow]:
    """The processes of the newest session: the living by rank, then those that were lost.

    Args:
        history: events of the run.
        is_running: whether the run is going on.
        recent: what was seen before; it is brought up to date.
    """
    session = history.happenings[history.first_of_session :]
    starts = (h.time for h in session if isinstance(h.event, RunStarted) and not h.event.continued)
    start = next(starts, None)
    rows = []
    for process in sorted(history.processes, key=lambda p: (p.until is not None, p.rank)):
        if process.until is not None:
            state = "lost"
        elif not is_running:
            state = "ended"
        else:
            state = "joining rank" if start is not None and process.since > start else "living"
        spent = tuple(process.seconds.values())
        rows.append(RankRow(process, state, recent.of(process), _shares(spent)))
    return rows


def _shares(seconds: Sequence[float]) -> tuple[float, ...]:
    total = sum(seconds)
    return tuple(part / total for part in seconds) if total > 0 else ()


def percentages(shares: Sequence[float]) -> list[str]:
    """Shares as `75%`; `-` for each kind of work where nothing was measured."""
    return [f"{share:.0%}" for share in shares] or ["-"] * len(KINDS)


def ranks_alive(history: History, summary: Summary) -> str:
    """How many ranks there are of those that the run was started on: `3 of 4 ranks`."""
    total = history.plan.world_size if history.plan else summary.ranks
    if not total:
        return "no ranks yet"
    ranks = text.count(total, "rank")
    if summary.state == "running" and history.processes:
        return f"{len(history.living)} of {ranks}"
    return ranks


def steps(summary: Summary) -> str:
    """`5/100`."""
    total = f"/{summary.total_steps:,}" if summary.total_steps else ""
    return f"{summary.step:,}{total}"


def left(summary: Summary, now: float) -> str:
    """The time that a run still takes, `0:01:05`; empty if it is not known.

    Args:
        summary: summary of the run.
        now: Unix time.
    """
    if summary.left_s is None or summary.state != "running":
        return ""
    return text.clock(max(0.0, summary.left_s - max(0.0, now - summary.newest)))


def bar(summary: Summary, width: int) -> str:
    """A bar of `width` columns for the share of the steps that are done; blank without a plan."""
    if not summary.total_steps:
        return " " * width
    eighths = round(8 * width * min(1.0, summary.step / summary.total_steps))
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width, "░")


def newest_loss(summary: Summary) -> str:
    """The newest training loss, then that of another split."""
    metrics = summary.metrics
    others = [name for name in metrics if name.endswith("/loss") and name != "train/loss"]
    names = [name for name in ("train/loss", *others[:1]) if name in metrics]
    return " | ".join(text.number(metrics[name]) for name in names)


def cost_of_steps(history: History, summary: Summary) -> str:
    """`a step 5.9 ms; 6.1 ms predicted by plan.json`; empty while too little was measured."""
    cost = step_time(cost_of_run(summary, history))
    return cost and shown(f"a step {cost}")


def name_of(path: Path, folders: Sequence[Path]) -> str:
    """The path relative to the only folder that is watched, or else as it is."""
    if len(folders) == 1 and path != folders[0]:
        return shown(os.path.relpath(path, folders[0]))
    return shown(str(path))


def shown(value: str) -> str:
    """A text as one line that a terminal can show, whatever a name or a message contains.

    Control characters and bytes that are not UTF-8 become escapes.
    """
    line = printable(value.replace("\t", " ")).replace("\n", " ⏎ ")
    return line.encode("utf-8", "backslashreplace").decode("utf-8")
