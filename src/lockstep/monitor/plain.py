"""Runs in plain lines: one picture of them all, and what is new at each look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lockstep.monitor import telling
from lockstep.monitor.watch import Watch, Watched
from lockstep.observe import text
from lockstep.reading.history import Happening

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
        yield f"no runs in {telling.shown(', '.join(map(str, watch.folders)))} yet"
    rows = [_cells(run, watch, now) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(f"{cell:<{room}}" for cell, room in zip(cells, widths, strict=True))
        yield line.rstrip()
    for run in runs:
        for problem in run.summary.problems:
            yield f"{telling.name_of(run.path, watch.folders)}: {telling.shown(problem)}"
    if len(runs) == 1:
        yield from _details(runs[0])


def _cells(run: Watched, watch: Watch, now: float) -> list[str]:
    summary = run.summary
    left, loss = telling.left(summary, now), telling.newest_loss(summary)
    return [
        telling.name_of(run.path, watch.folders),
        telling.shown(summary.task),
        summary.state,
        f"step {telling.steps(summary)}",
        left and f"left {left}",
        loss and f"loss {loss}",
        text.count(summary.ranks, "rank") if summary.ranks else "",
        telling.shown(" ".join(summary.tags)),
        summary.sha256 and f"SHA-256 {telling.shown(summary.sha256)}",
    ]


def _details(run: Watched) -> Iterator[str]:
    history = run.history
    for problem in (run.problem, *history.problems):
        if problem:
            yield telling.shown(problem)
    took = telling.cost_of_steps(history, run.summary)
    if took:
        yield took
    is_running = run.summary.state == "running"
    for row in telling.rank_rows(history, is_running, telling.Looks()):
        shares = zip(text.KINDS_OF_WORK, telling.told_shares(row.all), strict=True)
        yield (
            f"rank {row.rank} {row.state}: {telling.shown(row.host)} (pid {row.pid})  "
            + "  ".join(map(" ".join, shares))
        )
    for cause in run.causes():
        yield from telling.told_cause(cause)
    for happening in history.happenings[-_MOST_EVENTS:]:
        yield told_with_time(happening)


def told_with_time(happening: Happening) -> str:
    """An event's line behind its local time."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(happening.time))
    return f"{clock} {telling.told_event(happening)}"


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
            name, state = telling.name_of(run.path, watch.folders), run.summary.state
            is_new = run.path not in self._states
            if self._states.get(run.path) != state:
                self._states[run.path] = state
                self._tell(f"{name}: {state} at step {telling.steps(run.summary)}")
            if is_new:
                self._newest[run.path] = run.summary.newest
            elif run.summary.newest > self._newest[run.path]:
                self._tell_events(run, name)
        for path in self._states.keys() - watch.runs.keys():
            self._tell(f"{telling.name_of(path, watch.folders)}: is gone")
            del self._states[path], self._newest[path]

    def _tell_events(self, run: Watched, name: str) -> None:
        newest = self._newest[run.path]
        new = [h for h in run.history.happenings if h.time > newest]
        for happening in new:
            self._tell(f"{name}: {told_with_time(happening)}")
        self._newest[run.path] = max((h.time for h in new), default=newest)
