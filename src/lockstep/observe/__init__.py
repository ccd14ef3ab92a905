"""Events in; console, CSV, JSONL, TensorBoard and result files out.

The engine emits events (`lockstep.engine.events`) on every rank, to its `EventHub`. The hub of rank
0 shows and stores them with the sinks of `open_sinks`; the others keep the newest events, since any
of them may become rank 0. A run directory then contains:

    events.jsonl    every event, in order, over all sessions of the run
    metrics.csv     the curves, free of steps that a resumed run did again
    logged/         pictures of `lockstep.log`
    tensorboard/    the curves for TensorBoard, if requested
    trackers/       files of the requested trackers
    result.json     how the run ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.observe.showing.console import (
    ConsoleView,
    NotebookView,
    QuietView,
    in_notebook,
)
from lockstep.observe.sink import EventHub, Sink, Sinks
from lockstep.observe.step_costs import Measured, Predicted, StepCost
from lockstep.observe.storing.files import Pictures
from lockstep.observe.storing.jsonl import EventsJsonl, event_from_row, read_events
from lockstep.observe.storing.metrics_csv import MetricsCsv
from lockstep.observe.storing.result import ResultJson, read_result
from lockstep.observe.trackers.tracker_sink import TensorBoard, TrackerSink

__all__ = [
    "EventHub", "Measured", "Predicted", "Sinks", "StepCost", "event_from_row", "open_sinks",
    "read_events", "read_result", "view",
]  # fmt: skip


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
