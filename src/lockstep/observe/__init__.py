"""Events in; console, CSV, JSONL, TensorBoard and result files out.

The engine emits events (`lockstep.engine.events`) on every rank, to its `EventHub`. That of rank 0
shows and stores them with the sinks of `open_sinks`; all keep those that are not stored yet, since
any of them may become rank 0. A run directory then contains:

    events.jsonl    every event, in order, over all sessions of the run
    metrics.csv     the curves, free of steps that a resumed run did again
    logged/         pictures of `lockstep.log`
    tensorboard/    the curves for TensorBoard, if requested
    trackers/       files of the requested trackers
    result.json     how the run ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.parsing import parse_object
from lockstep.engine.events import (
    Backlog,
    Event,
    Failed,
    Finished,
    Logged,
    Recovered,
    RunStarted,
    StepDone,
    Warned,
)
from lockstep.observe.showing.console import ConsoleView, NotebookView, QuietView, in_notebook
from lockstep.observe.sink import Sink, Sinks
from lockstep.observe.step_costs import Measured, Predicted, StepCost, StepMeter
from lockstep.observe.storing.files import MOST_PICTURES, Pictures
from lockstep.observe.storing.jsonl import EventsJsonl, dumps, event_from_row, read_events, row_of
from lockstep.observe.storing.metrics_csv import MetricsCsv
from lockstep.observe.storing.result import ResultJson, read_result
from lockstep.observe.trackers.tracker_sink import TensorBoard, TrackerSink

__all__ = [
    "EventHub", "Measured", "Predicted", "Sinks", "StepCost", "event_from_row", "open_sinks",
    "read_events", "read_result", "view",
]  # fmt: skip


_MOST_KEPT = 1 << 16
"""Of events that cannot be stored, so many are kept; a `StepDone` counts once more for each rank.

They are some 25 MB of JSON, which every joining rank gets.
"""


class EventHub(Backlog):
    """Shows and stores events where it is open, on rank 0; keeps what is not stored, on all.

    So if rank 0 is lost, while its disk is full or before, the next one can store what it had not;
    sinks do not store an event twice. Where it is opened in the middle of a run, it waits for the
    `RunStarted` that says so: sinks take no step after a later one. Ranks learn in each step what
    rank 0 has stored, and are never more than one step apart. On the first rank of a host with a
    run directory of its own it is open, too, and only stores. Where storing fails for long, the
    newest `_MOST_KEPT` events are kept, and rank 0 warns once. Every hub measures what steps cost,
    and emits it before the end.

    Args:
        open_sinks: function that opens everything that stores events, and what shows them if its
            argument says so.
    """

    def __init__(self, open_sinks: Callable[[bool], Sinks]) -> None:
        self._open_sinks = open_sinks
        self._sinks: Sinks | None = None
        self._shows = False
        self._kept: deque[Event] = deque()
        self._weight = 0
        self._has_warned = False
        self._from = 0
        self._plan: RunStarted | None = None
        self._waits = False
        self._meter = StepMeter()

    def open(self, shows: bool = True) -> None:
        """Store events from now on, and show them if `shows`; no-op if it does."""
        if self._shows != shows:
            self._close_sinks()
        if self._sinks is None:
            self._sinks, self._shows = self._open_sinks(shows), shows
            self._waits = self._plan is not None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._meter.take(event)
        if isinstance(event, (Finished, Failed)):
            self._take(self._meter.measured(event.step))
        self._take(event)

    @property
    def stored(self) -> int:
        """Step up to whose events this process has stored all; -1 if it stores none."""
        return self._sinks.stored if self._sinks is not None else -1

    def keep_from(self, step: int) -> None:
        """Learn that rank 0 has stored all events of the steps before this one."""
        # What this process stores itself may lag behind, and another session of it begin here.
        self._from = step if self._sinks is None else min(step, self._sinks.stored)

    def rows(self) -> list[str]:
        """What is kept, but for the content of pictures, each event as a line of JSON."""
        events = self._kept if self._plan is None else (self._plan, *self._kept)
        return [dumps(row_of(event, 0.0)) for event in events]

    def take(self, rows: list[str]) -> None:
        """Keep what another rank has kept."""
        self._kept = deque(event_from_row(parse_object(row.encode())) for row in rows)
        if self._kept and isinstance(plan := self._kept[0], RunStarted):
            self._waits |= self._plan is None
            self._plan = plan
            self._kept.popleft()
        self._weight = sum(map(_weight, self._kept))

    def _take(self, event: Event) -> None:
        """Show and store an event where it is open, and keep it."""
        if isinstance(event, RunStarted):
            self._start(event)
            return
        if isinstance(event, (Failed, Finished, Recovered)):
            self._go_on(event.step)
        if self._sinks is not None and not self._waits:
            self._sinks(event)
        if not isinstance(event, Predicted):  # which only the meter needs
            self._keep(event)

    def _start(self, plan: RunStarted) -> None:
        """Begin, go back to a checkpoint, or go on for a rank 0 that is lost."""
        has_begun, self._plan, self._waits = self._plan is not None, plan, False
        if self._sinks is not None:
            self._sinks(plan)
            for missed in self._kept if plan.continued else ():
                self._sinks(missed)
        if not plan.continued:  # one that goes back to a checkpoint repeats later steps
            again = self._kept if has_begun else ()
            self._kept = deque(kept for kept in again if kept.step <= plan.step)
            self._weight = sum(map(_weight, self._kept))

    def _go_on(self, step: int) -> None:
        """Store what is kept if it waits still: nobody will say that another one goes on here."""
        if self._sinks is not None and self._waits and self._plan is not None:
            self._start(replace(self._plan, step=step, continued=True))

    def _keep(self, event: Event) -> None:
        oldest = min(event.step - 1, self._from)
        while self._kept and self._kept[0].step < oldest:
            self._drop()
        self._kept.append(event)
        self._weight += _weight(event)
        while self._weight > _MOST_KEPT and self._kept[0].step < event.step - 1:
            self._drop()
            self._warn(event.step)
        if isinstance(event, Logged) and event.png:
            shown = [(i, e) for i, e in enumerate(self._kept) if isinstance(e, Logged) and e.png]
            for i, picture in shown[:-MOST_PICTURES]:
                self._kept[i] = replace(picture, png=b"")

    def _drop(self) -> None:
        self._weight -= _weight(self._kept.popleft())

    def _warn(self, step: int) -> None:
        """Say once where events are shown or stored that ranks do not keep all of them."""
        if self._sinks is not None and not (self._waits or self._has_warned):
            self._has_warned = True
            message = (
                f"too many events wait to be stored since step {self._from}: if rank 0 is lost, "
                "files of the run lack the oldest of them; make room, or its files writable"
            )
            self._sinks(Warned(step=step, message=message))

    def close(self) -> None:
        """Store what is still kept."""
        if self._kept:
            self._go_on(self._kept[-1].step)
        self._close_sinks()

    def _close_sinks(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
            self._sinks = None


def _weight(event: Event) -> int:
    return 1 + (len(event.ranks) if isinstance(event, StepDone) else 0)


def open_sinks(
    run_dir: Path,
    *,
    tensorboard: bool,
    console: bool,
    trackers: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    quiet: bool = False,
    resumable: bool = True,
    per_rank: bool = False,
    verbose: bool = False,
) -> Sinks:
    """Opens all that shows and stores a run on rank 0; closed at the end of a `with` block.

    A run that resumes from a checkpoint uses the same files. The step that it resumes from is that
    of its `RunStarted`: curves of later steps are then removed, since they come again.

    Args:
        run_dir: path of the run directory; created if it does not exist.
        tensorboard: whether to write TensorBoard event files.
        console: whether to show the run on standard output.
        trackers: names of experiment trackers that receive curves and pictures.
        params: keys of the config with their values, for trackers.
        quiet: whether to show warnings and how the run ended only.
        resumable: whether `lockstep resume` can go on with the run.
        per_rank: whether the console shows with each report what each rank does with its time.
        verbose: whether the console shows checkpoints, all evaluations and how work is shared.

    Raises:
        RunDirectoryError: the directory or a file in it is not writable, or damaged.
        ConfigError: TensorBoard or a tracker is asked for and not installed.
    """
    sinks: list[Sink] = []
    with ExitStack() as undo:

        def add(sink: Sink) -> None:
            sinks.append(sink)
            undo.callback(sink.close)

        add(Pictures(run_dir))  # first: the row of a picture names its file
        # Before the events: a launcher takes `Finished` there for the end. If all ranks are killed
        # between the two files, what it takes for a completed run must have its result.
        add(ResultJson(run_dir / "result.json"))
        add(EventsJsonl(run_dir / "events.jsonl"))
        add(MetricsCsv(run_dir / "metrics.csv"))
        if tensorboard:
            add(TensorBoard(run_dir / "tensorboard"))
        for name in trackers:
            add(TrackerSink(name, run_dir, params or {}))
        if console:
            shown = view(quiet, resumable, per_rank, verbose)
            add(shown)
            shown.wait("preparing the run")
        undo.pop_all()
    return Sinks(sinks)


def view(
    quiet: bool, resumable: bool = True, per_rank: bool = False, verbose: bool = False
) -> ConsoleView | NotebookView:
    """The view of a run for the user who has started it: in a notebook's cell, or on stdout.

    Args:
        quiet: whether to show warnings and how the run ended only.
        resumable: whether `lockstep resume` knows how to go on with the run.
        per_rank: whether to show with each report what each rank does with its time; not in a
            notebook, and not where `quiet` is set.
        verbose: whether to show checkpoints, all evaluations and how work is shared out, too.
    """
    if quiet:
        return QuietView(resumable=resumable)
    if in_notebook():
        return NotebookView(resumable=resumable)
    return ConsoleView(resumable=resumable, per_rank=per_rank, verbose=verbose)
