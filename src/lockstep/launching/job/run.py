"""Running ranks to their end: their output, events and stop requests; no process is left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from lockstep.comm.calls import sized_memory
from lockstep.config.files import open_regular
from lockstep.errors import LaunchError, LockstepError, RunDirectoryError, file_errors
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import MARK, kill_marked
from lockstep.launching.job.commands import RankCommand
from lockstep.launching.job.job import GRACE_S, Job
from lockstep.launching.job.preflight import resource_error
from lockstep.launching.rank.process import PREEMPTED, Terminal
from lockstep.observe.storing.jsonl import end_of_events, follow_events

_TERMINATE_S = 3.0


@dataclass(frozen=True)
class Captured:
    """The result of a command that has ended.

    Attributes:
        exit_code: exit code of the command, negative for a signal; None if it ran out of time.
        stdout: text the command wrote to standard output.
        stderr: text the command wrote to standard error.
    """

    exit_code: int | None
    stdout: str
    stderr: str


def capture(command: RankCommand, env: Mapping[str, str], timeout_s: float) -> Captured:
    """Run a command that starts ranks; none of its processes is left on return.

    Args:
        command: command to run.
        env: all environment variables of the command.
        timeout_s: time in seconds after which the command is killed.
    """
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        bound_to_parent(command.argv),
        env={**env, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # mpirun clears its ranks' shared memory if it is asked to end; killed, it can't.
            child.terminate()
            try:
                stdout, stderr = child.communicate(timeout=_TERMINATE_S)
            except subprocess.TimeoutExpired:
                kill_marked(mark)
                child.kill()
                stdout, stderr = child.communicate()
            return Captured(None, stdout, stderr)
        finally:
            kill_marked(mark)
    return Captured(child.returncode, stdout, stderr)


Row: TypeAlias = dict[str, Any]
_Inbox: TypeAlias = "queue.Queue[Callable[[], None] | None]"

LOG_NAME = "ranks.log"
"""The file in a run directory with what its ranks, and mpirun, wrote to standard error."""

_TAIL_BYTES = 8192
_POLL_S = 0.1
_MOST_WAITING = 256


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        exit_code: exit code of the command; 128 + the signal's number where a signal ended it.
        stderr_tail: last lines written to standard error.
        last: row of the last `Failed` or `Finished` event, if there was one.
        log: path of the file with all of standard error.
        stopped_by: first signal to this process that requested a stop, if there was one.
        met: whether all ranks had met each other.
    """

    exit_code: int
    stderr_tail: str
    last: Row | None
    log: Path
    stopped_by: signal.Signals | None
    met: bool


_NEVER_STARTED = "The PMIx server's listener thread failed to start"
"""What mpirun says when it could not begin."""


def run_ranks(
    command: RankCommand,
    env: Mapping[str, str],
    *,
    run_dir: Path,
    on_row: Callable[[Row], None],
    on_line: Callable[[str], None] = print,
    on_notice: Callable[[str], None] = print,
) -> Outcome:
    """Run a command that starts ranks, to its end; none of its processes is left on return.

    Ctrl-C (SIGINT), SIGTERM and SIGHUP ask all ranks to stop at the next step boundary, and end
    them when they come a second time; SIGUSR1 is passed on as the notice of a preemption. The
    ranks don't hear the terminal themselves. Should this process be killed, they end too; so
    call this from a thread that lives as long as they do.

    Args:
        command: command to run.
        env: all environment variables of the command.
        run_dir: run directory, where the ranks write `events.jsonl`; gets `ranks.log`.
        on_row: called in this thread with each new row of `events.jsonl`.
        on_line: called in this thread with each line of the ranks' standard output.
        on_notice: called in this thread with messages about the launch itself.

    Raises:
        LaunchError: the ranks did not meet each other.
        LockstepError: the system does not start the command.
        RunDirectoryError: the run directory cannot be used.
    """
    once = functools.partial(
        _run_once, command, env, run_dir, on_row=on_row, on_line=on_line, on_notice=on_notice
    )
    outcome = once()
    if _NEVER_STARTED in outcome.stderr_tail and not outcome.met and outcome.stopped_by is None:
        outcome = once()  # mpirun itself had failed, now and then for no reason, before any rank
    return outcome


def _run_once(
    command: RankCommand,
    env: Mapping[str, str],
    run_dir: Path,
    *,
    on_row: Callable[[Row], None],
    on_line: Callable[[str], None],
    on_notice: Callable[[str], None],
) -> Outcome:
    """As `run_ranks`, without another try."""
    log, events = run_dir / LOG_NAME, run_dir / "events.jsonl"
    # Signals first: who sees the log may send some.
    with _received_signals() as received, _opened(log) as stderr, _stop_file() as stop_file:
        log_start, rows_start = stderr.tell(), end_of_events(events)

        def written() -> list[Row]:
            rows: list[Row] = []
            with contextlib.suppress(LockstepError):
                rows.extend(follow_events(events, lambda: True, start=rows_start))
            return rows

        try:
            job = Job(command, env, stderr, on_notice, written, stop_file)
        except OSError as error:
            # No `LaunchError`: another try would end like this one.
            raise LockstepError(f"the ranks could not be started: {_refused(error)}") from None
        # Bounded: ranks that print faster than the output is shown have to wait.
        inbox: _Inbox = queue.Queue(_MOST_WAITING)

        def take_row(row: Row) -> None:
            if job.note(row):
                on_row(row)

        # Readers only queue actions: all callbacks run in this thread.
        def read_rows() -> None:
            try:
                for row in follow_events(events, job.ended.is_set, start=rows_start):
                    inbox.put(functools.partial(take_row, row))
            except LockstepError as error:
                inbox.put(functools.partial(on_notice, str(error)))

        def read_lines() -> None:
            for line in job.lines():
                inbox.put(functools.partial(on_line, line))

        readers = [_start_thread(read_rows, inbox), _start_thread(read_lines, inbox)]
        try:
            _work_off(inbox, len(readers), job, received)
        finally:
            job.end()
            deadline = time.monotonic() + GRACE_S
            while any(r.is_alive() for r in readers) and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    inbox.get(timeout=_POLL_S)
        tail = _tail(stderr, log_start)
    if job.failure:
        raise LaunchError(f"{job.failure}; see {log}" + (f"\n{tail}" if tail else ""))
    return Outcome(job.exit_code, tail, job.last, log, job.stopped_by, job.met)


def _refused(error: OSError) -> str:
    """Why the system does not start a program, and what to do."""
    return resource_error(error) or (
        f"{error.filename}: {error.strerror}; make sure that this user may run it"
    )


def _work_off(inbox: _Inbox, num_readers: int, job: Job, received: list[signal.Signals]) -> None:
    """Run the actions of readers, and handle signals, until all readers are done."""
    while num_readers:
        with contextlib.suppress(queue.Empty):
            action = inbox.get(timeout=_POLL_S)
            if action is None:
                num_readers -= 1
            else:
                action()
        while received:
            job.handle(received.pop(0))
        job.check()


def _start_thread(read: Callable[[], None], inbox: _Inbox) -> threading.Thread:
    """Start a thread that runs `read` and then puts None into the queue."""

    def run() -> None:
        try:
            read()
        finally:
            inbox.put(None)

    thread = threading.Thread(target=run, name=read.__name__, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """A list that signals are appended to, in place of their usual effect."""
    received: list[signal.Signals] = []
    previous: dict[signal.Signals, Any] = {}
    terminal = Terminal()
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, PREEMPTED):
            # nohup and the like have signals ignored on purpose.
            if signal.getsignal(signum) != signal.SIG_IGN:
                previous[signum] = signal.signal(
                    signum, lambda number, _: received.append(terminal.meant_by(number))
                )
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _stop_file() -> Iterator[Path]:
    """The path of a file in memory for the reason of a stop.

    Where the system has no such files, ranks take each stop to be an interruption.
    """
    descriptor = sized_memory("lockstep-stop", 0)
    if descriptor < 0:
        yield Path(os.devnull)
        return
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _opened(log: Path) -> IO[bytes]:
    with file_errors(RunDirectoryError, log, advice="choose another --run-dir"):
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(open_regular(log, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")


def _tail(log: IO[bytes], start: int) -> str:
    """The last lines of the log from `start` on, even if it was moved or deleted."""
    end = os.fstat(log.fileno()).st_size
    first = max(start, end - _TAIL_BYTES)
    return os.pread(log.fileno(), end - first, first).decode(errors="replace").strip()
