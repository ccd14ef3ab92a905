"""Trainings in processes of their own, some at a time, to their end or to Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lockstep.errors import LaunchError
from lockstep.files import open_regular
from lockstep.launchers.host.tether import tethered

_POLL_S = 0.05
_PATIENCE_S = 60.0
"""How long trainings may take to stop with a checkpoint, before they are ended."""


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
    """Run all jobs, in their order; what becomes of one does not stop the others.

    Ctrl-C, or SIGTERM, has those that run stop with a checkpoint, and starts no more; a second one
    ends them. Should this process be killed, they are told to stop by the kernel (Linux).

    Args:
        jobs: jobs to run.
        at_once: greatest number of jobs that run at a time.
        on_start: called with a job that was started.
        on_end: called with a job that has ended, and its exit code.

    Returns:
        Whether all were run, so that no signal has stopped this.

    Raises:
        LaunchError: a log cannot be written; those that run are stopped first.
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
    """Has trainings stop when signals have come."""

    def __init__(self, signals: list[int]) -> None:
        self._signals = signals
        self._num_told = 0
        self._deadline = float("inf")

    def look(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        """Tell those that run: first to stop with a checkpoint, then to end."""
        if len(self._signals) > self._num_told:
            signum = signal.SIGTERM if self._num_told else signal.SIGINT
            self._num_told = len(self._signals)
            self._deadline = time.monotonic() + _PATIENCE_S
            for process in processes:
                process.send_signal(signum)
        elif time.monotonic() > self._deadline:
            for process in processes:
                process.kill()


def _started(job: Job) -> subprocess.Popen[bytes]:
    try:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = open_regular(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise LaunchError(f"{job.log}: cannot be written: {error.strerror}") from None
    try:
        return subprocess.Popen(
            tethered(list(job.argv), signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # or the terminal's Ctrl-C would reach it twice
        )
    finally:
        os.close(log)


@contextlib.contextmanager
def _received(signals: list[int]) -> Iterator[None]:
    """Collect the signals that ask for the end, instead of what they do otherwise."""

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, note) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
