"""Settings of a rank's own process: threads, signals and output; and a trace of a few steps."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.engine.events import Emit, Profiled, Warned
from lockstep.engine.step.sums import OUT_OF_TIME
from lockstep.errors import LockstepError
from lockstep.launching.host.processes import (
    THREAD_VARIABLES,
    children,
    thread_warnings,
    usable_cores,
)
from lockstep.launching.rank.early import EarlyNotice, begin_training
from lockstep.launching.rank.environment import Environment, detect


@contextlib.contextmanager
def num_threads(threads: int, environment: Environment) -> Iterator[list[str]]:
    """Compute with this many threads in this process within the context.

    Args:
        threads: number of threads of each rank.
        environment: place of this process among the ranks.

    Yields:
        Warnings: more threads than cores on this host, or cores left idle.
    """
    before = torch.get_num_threads()
    variables = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    torch.set_num_threads(threads)
    if environment.world_size > 1:
        # This cannot be undone, so only in a process that exists to be a rank. It is refused once
        # operations have run in parallel; then the only cost is some idle threads.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
    try:
        ranks = environment.local_world_size
        yield thread_warnings(threads, ranks, cores_of_host(environment))
    finally:
        torch.set_num_threads(before)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cores_of_host(environment: Environment) -> int:
    """Cores that all ranks of this host may use."""
    # mpirun may bind each rank to cores of its own: what all ranks of this host may use counts.
    siblings = children(os.getppid()) if environment.world_size > 1 else []
    return usable_cores(os.environ, environment.local_world_size, siblings)


ASK_STOP = signal.SIGUSR2
"""Signal from the launcher to its ranks to stop at the next step boundary: mpirun passes it on,
where it would answer SIGINT and SIGTERM by killing the ranks."""

PREEMPTED = signal.SIGUSR1
"""Signal that a batch system sends some time before it ends the job."""

STOP_FILE = "LOCKSTEP_STOP_FILE"
"""Environment variable with the path of a file that holds the reason of an `ASK_STOP`."""

_REASONS = {
    signal.SIGINT: "interrupted",
    ASK_STOP: "interrupted",
    signal.SIGHUP: "hung up",
    signal.SIGTERM: "terminated",
    PREEMPTED: "preempted",
    signal.SIGXCPU: OUT_OF_TIME,
}

_TO_SAVE_S = 5
"""Processor time that is kept for the end of the last step and its checkpoint."""


def write_reason(path: Path, signum: signal.Signals) -> None:
    """Write the reason of a stop, before `ASK_STOP` is sent to the ranks."""
    with contextlib.suppress(OSError):  # without it they take the reason to be an interruption
        path.write_text(_REASONS[signum])


def stop_signals() -> dict[str, int]:
    """The signals that reasons in that file stand for, where they reach ranks without it."""
    return {reason: int(signum) for signum, reason in reversed(_REASONS.items())}


class Terminal:
    """The terminal of this process, if it has one."""

    def __init__(self) -> None:
        self._was_there = self._is_there()
        self._files = [fd for fd in range(3) if os.isatty(fd)]

    def meant_by(self, signum: int) -> signal.Signals:
        """The signal, or SIGINT for a SIGHUP that means that the terminal was closed."""
        if signum != signal.SIGHUP or not self._was_there or self._is_there():
            return signal.Signals(signum)
        # From here on output has nowhere to go, and must not end a process that stops in order.
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self._files:
            os.dup2(nowhere, fd)
        os.close(nowhere)
        return signal.SIGINT

    @staticmethod
    def _is_there() -> bool:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
        return True


class StopRequest:
    """Turns signals into a request to stop, while it is entered as a context manager.

    Enter it before other ranks can know of this one: from then on no such signal kills it. A
    preemption notice that came while this process started counts too.
    A second SIGINT raises `KeyboardInterrupt`. Outside of the main thread, where Python allows
    no signal handlers, nothing is ever requested.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._interrupts = 0
        self._terminal = Terminal()
        self._previous: dict[signal.Signals, Any] = {}
        self._blocked: set[int] = set()

    def reason(self) -> str | None:
        """The reason of a requested stop; None without a request."""
        return self._reason

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            begin_training()
            # A parent may have blocked them.
            self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _REASONS) & {*_REASONS}
            for signum in _REASONS:
                if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                    continue  # nohup
                previous = self._previous[signum] = signal.signal(signum, self._handle)
                if isinstance(previous, EarlyNotice) and previous.came:
                    self._reason = self._reason or _REASONS[signum]
            soft, hard = self._cpu_limit = resource.getrlimit(resource.RLIMIT_CPU)
            if hard > _TO_SAVE_S:  # where the kernel kills
                resource.setrlimit(resource.RLIMIT_CPU, (min(soft, hard - _TO_SAVE_S), hard))
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous:
            resource.setrlimit(resource.RLIMIT_CPU, self._cpu_limit)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        for signum, handler in self._previous.items():
            # None stands for a handler that was not installed from Python: it can't be put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._reason = self._reason or _reason(self._terminal.meant_by(signum))
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt


def _reason(signum: signal.Signals) -> str:
    path = os.environ.get(STOP_FILE)
    if signum == ASK_STOP and path:
        with contextlib.suppress(OSError, ValueError):
            reason = Path(path).read_text()
            if reason in _REASONS.values():
                return reason
    return _REASONS[signum]


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """Write each line of standard output as soon as it is complete, and in one call.

    Ranks may share one pipe, where lines written piece by piece (as `PYTHONUNBUFFERED` does)
    would mix.
    """
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.line_buffering, stream.write_through
    stream.reconfigure(line_buffering=True, write_through=False)
    try:
        yield
    finally:
        # Output that a full disk refuses fails here again; the run goes on without it.
        with contextlib.suppress(OSError):
            if not stream.closed:
                stream.reconfigure(line_buffering=before[0], write_through=before[1])


_SPEAK_S = 5.0
"""torchrun ends all ranks as soon as one has ended: others leave the first one so long to speak."""


def tell(error: LockstepError, place: str = "") -> None:
    """Print an error for the user, if this is the rank to do so and it was not printed yet.

    Another rank leaves that one the time to do so, under torchrun.

    Args:
        error: the error.
        place: text to add to the message.
    """
    if error.is_told:
        return
    try:
        environment = detect(os.environ)
    except LockstepError:
        environment = None  # whoever cannot know its rank has to say so
    # Rank 0 of the group or else of the launch, or the only rank that knows.
    rank = error.rank if error.rank is not None or environment is None else environment.rank
    if error.is_alone or not rank:
        print(f"error: {error}{place}", file=sys.stderr, flush=True)
    elif environment is not None and environment.launcher == "torchrun":
        time.sleep(_SPEAK_S)


class Profiler:
    """Records some steps of this process, and writes them as a Chrome trace.

    Use it in a `with` statement around the training; an incomplete trace at the end of the training
    is written too.

    Args:
        steps: first and last step to record, counted from the start of this session in this
            process, from 1; the first is at least 2.
        folder: path of the folder for traces; created if it is not there.
        slot: lifelong number of this process; part of the file's name.
        emit: function that takes events.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, slot: int, emit: Emit) -> None:
        self._first, self._last = steps
        self._folder = folder
        self._slot = slot
        self._emit = emit
        self._num_steps = self._step = self._since = 0
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._is_done = False

    def __call__(self, step: int) -> None:
        """Count a committed step; begins and ends the recording.

        Args:
            step: number of steps of the run that are committed.
        """
        self._num_steps, self._step = self._num_steps + 1, step
        self._end_range()
        if self._num_steps == self._first - 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._since = step + 1
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        elif self._num_steps == self._last:
            self._write()
        if self._profile is not None:
            self._range = record_function(f"step {step + 1}")
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def _end_range(self) -> None:
        """End the range of the step in the trace."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self) -> None:
        """End the recording and write it; a failure to write is a warning."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        self._is_done = True
        recorded.stop()
        path = self._folder / f"rank{self._slot}_steps{self._since}-{self._step}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # what torch raises where it cannot write
            message = f"{path}: the profile cannot be written: {error}"
            self._emit(Warned(step=self._step, message=message))
            return
        self._emit(Profiled(step=self._step, path=str(path)))

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end_range()
        if self._profile is not None and self._step >= self._since:
            self._write()
        elif self._profile is not None:
            self._profile.stop()
        if error is None and not self._is_done:
            message = (
                f"no profile: this session ended after {self._num_steps} steps, and step "
                f"{self._first} of it was to be the first recorded; choose others with "
                "--profile-steps"
            )
            self._emit(Warned(step=self._step, message=message))
