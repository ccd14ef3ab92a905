"""Trainings in processes of their own, some at a time, and what has become of them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.cli.look.report import print_table
from lockstep.cli.start.sweep_grid import Grid
from lockstep.config.files import open_regular
from lockstep.errors import ConfigError, LaunchError, file_errors
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.observe.figures import new_figure, save
from lockstep.observe.reading.listing import Summary, chosen
from lockstep.observe.text import printable

_POLL_S = 0.05
_PATIENCE_S = 60.0
"""Seconds that trainings may take to stop with a checkpoint, before they are killed."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        name: name of the training.
        argv: command that trains.
        log: path of the file that gets its output.
    """

    name: str
    argv: tuple[str, ...]
    log: Path


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    on_start: Callable[[Job], None],
    on_end: Callable[[Job, int], None],
) -> bool:
    """Run all jobs, in their order; the failure of one does not stop the others.

    At Ctrl-C or SIGTERM, running jobs stop with a checkpoint, and no more are started; a second
    signal ends them. If this process is killed, the kernel asks them to stop (Linux).

    Args:
        jobs: jobs to run.
        at_once: greatest number of jobs that run at a time.
        on_start: called with a job that was started.
        on_end: called with a job that has ended, and its exit code.

    Returns:
        Whether all jobs were run; a signal may have stopped this.

    Raises:
        LaunchError: a log cannot be written; running jobs are stopped first.
    """
    waiting = list(jobs)[::-1]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    signals: list[int] = []
    try:
        with _received(signals):
            stopper = _Stopper(signals)
            while running or (waiting and not signals):
                while waiting and len(running) < at_once and not signals:
                    job = waiting.pop()
                    running[job] = _started(job)
                    on_start(job)
                stopper.look(running.values())
                for job, process in list(running.items()):
                    if process.poll() is not None:
                        del running[job]
                        on_end(job, process.returncode)
                time.sleep(_POLL_S)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return not signals


class _Stopper:
    """Stops trainings when signals have come."""

    def __init__(self, signals: list[int]) -> None:
        self._signals = signals
        self._num_handled = 0
        self._deadline = float("inf")

    def look(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        """Signal the running jobs: first to stop with a checkpoint, then to end."""
        if len(self._signals) > self._num_handled:
            signum = signal.SIGTERM if self._num_handled else signal.SIGINT
            self._num_handled = len(self._signals)
            self._deadline = time.monotonic() + _PATIENCE_S
            for process in processes:
                process.send_signal(signum)
        elif time.monotonic() > self._deadline:
            for process in processes:
                process.kill()


def _started(job: Job) -> subprocess.Popen[bytes]:
    with file_errors(LaunchError, job.log):
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = open_regular(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return subprocess.Popen(
            bound_to_parent(list(job.argv), signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # or the terminal's Ctrl-C would reach it twice
        )
    finally:
        os.close(log)


@contextlib.contextmanager
def _received(signals: list[int]) -> Iterator[None]:
    """Collect SIGINT and SIGTERM, in place of their usual effect."""

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, note) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


_WIDTH, _HEIGHT = 4.0, 3.4
"""Inches of a panel."""
_MOST_PANELS = 6
_MOST_NAMES = 20
"""Most metrics that the message about an unknown metric names."""
_LOG_RATIO = 20.0
"""Ratio of the greatest to the least value from which an axis is logarithmic."""


def ordered_by(runs: Sequence[Summary], metric: str | None) -> tuple[str, bool]:
    """The key that runs are sorted by, and whether more of it is better.

    Args:
        runs: runs of a sweep, of which the first says what they watch.
        metric: a key, descending behind a `-`, or the plain name of a metric of `val`; None for the
            one that the runs watch.
    """
    config: Mapping[str, Any] = next((run.config for run in runs if run.config), {})
    watch = str(config.get("watch", "loss"))
    watched = watch if "/" in watch else f"val/{watch}"
    key = (metric or watched).removeprefix("-")
    of_val = f"val/{key}"
    if "/" not in key and (_has(runs, of_val) or not _has(runs, key)):
        key = of_val
    is_most_best = key == watched and config.get("watch_mode") == "max"
    return key, is_most_best or (metric or "").startswith("-")


def unknown(runs: Sequence[Summary], key: str) -> str:
    """The message that no run has the metric to sort by; empty if one has."""
    names = sorted({name for run in runs for name in run.metrics})
    if not names or _has(runs, key):
        return ""
    known = ", ".join(map(printable, names[:_MOST_NAMES]))
    return f"no run has {printable(key)}: choose another --metric: {known}"


def _has(runs: Sequence[Summary], key: str) -> bool:
    return any(run.value(key) is not None for run in runs)


def print_outcome(
    runs: Sequence[Summary], grid: Grid, metric: str, is_more_better: bool, folder: Path
) -> None:
    """Print the runs of a sweep, the best first."""
    order = f"-{metric}" if is_more_better else metric
    columns = ",".join([*grid.keys, metric, "state", "step", "seconds", "name"])
    print_table(chosen(runs, [], order), [folder], columns, num_found=len(runs))


def draw(runs: Sequence[Summary], grid: Grid, metric: str, path: Path) -> Path | None:
    """Draw a metric over each key that varies, as PNG.

    Returns:
        The picture's path; None if no run has the metric, or no key varies.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: it cannot be written.
    """
    values = [run.value(metric) for run in runs]
    shown = [
        (run, value)
        for run, value in zip(runs, values, strict=True)
        if isinstance(value, float) and math.isfinite(value)
    ]
    keys = grid.keys[:_MOST_PANELS]
    if not shown or not keys:
        return None
    figure = new_figure(_WIDTH * len(keys), _HEIGHT, "", extra="report")
    panels = figure.subplots(1, len(keys), squeeze=False, sharey=True)[0]
    heights = [value for _, value in shown]
    for key, panel in zip(keys, panels, strict=True):
        places = [run.value(key) for run, _ in shown]
        numbers = [p for p in places if isinstance(p, int | float) and not isinstance(p, bool)]
        if len(numbers) == len(places):
            panel.plot(numbers, heights, "o")
            if min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO:
                panel.set_xscale("log")
        else:
            panel.plot([printable(str(place))[:40] for place in places], heights, "o")
        panel.set_xlabel(printable(key))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(printable(metric))
    return save(figure, path)


def try_to_draw(runs: Sequence[Summary], grid: Grid, metric: str, path: Path) -> str:
    """Draw as `draw` does; returns a message, empty if there is nothing to draw."""
    try:
        picture = draw(runs, grid, metric, path)
    except ConfigError as error:
        return f"no picture: {error}"
    return f"picture: {picture}" if picture is not None else ""
