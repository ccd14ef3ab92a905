"""A launch while it runs: its processes, whether its ranks have met, and how it is ended."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import (
    MARK,
    children,
    is_alive,
    is_stopped,
    is_suspended,
    kill_marked,
    marked,
    send,
    shell_code,
    variable,
)
from lockstep.launching.job.commands import RankCommand
from lockstep.launching.rank.environment import SLOT
from lockstep.launching.rank.process import ASK_STOP, PREEMPTED, STOP_FILE, write_reason
from lockstep.launching.warm.proxy import PROXY

GRACE_S = 5.0
"""Seconds within which something that should end by itself must have ended."""

_LINE_BYTES = 1 << 16
_HOLD_S = 1.0
_POLL_S = 0.002

_MPI_RANK = "OMPI_COMM_WORLD_RANK"


def named(ranks: Sequence[str]) -> str:
    """Ranks as a subject: rank 1, or ranks 1, 2."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def shows_met(row: Mapping[str, Any]) -> bool:
    """Whether an event shows that all ranks have met."""
    return row.get("event") in ("Joined", "RunStarted", "Failed", "Finished")


def _is_new(pid: int) -> bool:
    """Whether ranks have started this process."""
    return bool(variable(pid, SLOT))


class Job:
    """A running command and what is known of its ranks.

    Args:
        command: command to run.
        env: all environment variables of the command.
        stderr: file that gets the command's standard error.
        notify: called with each message for the user.
        written: returns the rows that the ranks have written so far; `note` may not have seen all
            of them.
        stop_file: path of the file from which ranks read the reason of a stop.

    Attributes:
        ended: event that is set when all processes are gone.
        failure: reason why the ranks were ended before they had met, if they were.
        last: row of the last `Failed` or `Finished` event, if there was one.
        stopped_by: first signal that requested a stop, if there was one.
        met: whether all ranks have met each other.
    """

    def __init__(
        self,
        command: RankCommand,
        env: Mapping[str, str],
        stderr: IO[bytes],
        notify: Callable[[str], None],
        written: Callable[[], list[dict[str, Any]]],
        stop_file: Path,
    ) -> None:
        self.ended = threading.Event()
        self.failure: str | None = None
        self.last: dict[str, Any] | None = None
        self.stopped_by: signal.Signals | None = None
        self._command = command
        self._notify = notify
        self._written = written
        self._stop_file = stop_file
        self._start_deadline = time.monotonic() + command.start_timeout_s
        self._kill_deadline: float | None = None
        self.met = False
        self._is_foreign = False
        self._local_pids: set[int] = set()
        self._proxies: set[int] = set()
        self._ranks: dict[str, int] = {}
        self._complete_at = self._seen_at = time.monotonic()
        self._mark = uuid.uuid4().hex
        # At SIGTERM mpirun ends its ranks, here and elsewhere, and clears its shared memory;
        # torchrun would give them half a minute first.
        death_signal = signal.SIGTERM if command.launcher == "mpi" else signal.SIGKILL
        self._child = subprocess.Popen(
            bound_to_parent(list(command.argv), death_signal),
            env={**env, MARK: self._mark, STOP_FILE: str(stop_file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=command.fds,
            start_new_session=True,  # or the terminal's Ctrl-C would reach the ranks directly
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the command, once it has ended; 128 + the number of a signal."""
        return shell_code(self._child.returncode)

    def lines(self) -> Iterator[str]:
        """The ranks' standard output; a line that is too long comes in pieces."""
        assert self._child.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with self._child.stdout as stdout:
            while piece := stdout.readline(_LINE_BYTES):
                yield decoder.decode(piece, final=piece.endswith(b"\n")).rstrip("\n")

    def note(self, row: dict[str, Any]) -> bool:
        """Take note of an event; returns whether it came from these ranks.

        Another launch may write to the same file while the ranks of this one wait for its end.
        """
        kind = row.get("event")
        is_here = kind == "Joined" and row.get("host") == socket.gethostname()
        if is_here:
            was_foreign = self._is_foreign
            self._is_foreign = variable(row["pid"], MARK) not in ("", self._mark)
            if self._is_foreign and not was_foreign:
                self._notify("another job is training in this run directory: waiting for its end")
        if self._is_foreign:
            return False
        self.met = self.met or shows_met(row)
        if is_here:
            self._local_pids.add(row["pid"])
            if proxy := variable(row["pid"], PROXY):
                self._proxies.add(int(proxy))
        if kind in ("Failed", "Finished"):
            self.last = row
        return True

    def handle(self, signum: signal.Signals) -> None:
        """Handle a signal that this process has received."""
        if self.ended.is_set():
            return
        again = self.stopped_by not in (None, PREEMPTED) and signum != PREEMPTED
        if self.stopped_by in (None, PREEMPTED):
            self.stopped_by = signum
        if again:
            self._notify(f"{signum.name}: ending the ranks")
            self._terminate()
            return
        if not self.met and not self._meets_while_suspended():
            return
        hint = "" if signum == PREEMPTED else " (again to end the ranks at once)"
        self._notify(f"{signum.name}: stopping at the next step boundary{hint}")
        if signum == PREEMPTED:
            self._ask_stop(PREEMPTED)
        else:
            write_reason(self._stop_file, signum)
            self._ask_stop(ASK_STOP)

    def check(self) -> None:
        """Check whether the command has ended, or must be ended; called repeatedly."""
        now = time.monotonic()
        if self.ended.is_set():
            return
        if self._child.poll() is not None:
            if self._lost_a_rank_at_start():
                self.failure = "a rank ended before all had started"
            self.end()
        elif self._kill_deadline is not None:
            if now > self._kill_deadline:
                self.end()
        elif not self.met:
            self._check_start(now)
        elif self._command.launcher == "mpi":
            # After a loss, mpirun may wait for ever although the last rank has ended, or for new
            # processes that came too late.
            living = children(self._child.pid)
            joined = self._local_pids | self._proxies
            if any(pid in joined or not _is_new(pid) for pid in living):
                self._seen_at = now
            elif now > self._seen_at + GRACE_S:
                self.end()

    def end(self) -> None:
        """Kill whatever is left and wait until it is gone."""
        kill_marked(self._mark, self._local_pids | self._proxies | set(self._ranks.values()))
        if self._child.poll() is None:  # where processes can't be found by their mark
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self.ended.set()

    def _meets_while_suspended(self) -> bool:
        """Whether the ranks have met; if not, they are ended before they can do a step.

        They are suspended meanwhile: their newest events may not have been read yet. Not under
        mpirun, which has been seen to end with code 1 after that.
        """
        suspended = [pid for pid in marked(self._mark) if pid != self._child.pid]
        deadline = time.monotonic() + _HOLD_S
        if self._command.launcher == "mpi":
            deadline = 0.0
        else:
            send(suspended, signal.SIGSTOP)
        while not all(map(is_suspended, suspended)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for row in self._written():  # these also name the processes to stop
            self.note(row)
        if self.met:
            if self._command.launcher != "mpi":
                send(suspended, signal.SIGCONT)
        elif self._command.launcher == "mpi":
            # Ranks must not get mpirun's SIGTERM and train on; mpirun itself may clean up.
            send(suspended, signal.SIGKILL)
            self._terminate()
        else:
            self.end()
        return self.met

    def _check_start(self, now: float) -> None:
        if now > self._start_deadline:
            stopped = sorted(r for r, pid in self._ranks.items() if is_stopped(pid))
            who = f" ({named(stopped)} stopped by a signal)" if stopped else ""
            self._fail(
                f"the ranks did not all start within {self._command.start_timeout_s:g} s{who}"
            )
        elif self._command.launcher == "mpi":
            # With fault tolerance, mpirun goes on when a rank dies, and the others wait for that
            # rank in MPI_Init for ever. On the launcher's host, ranks are mpirun's children.
            for pid in children(self._child.pid):
                if rank := variable(pid, _MPI_RANK):
                    self._ranks[rank] = pid
            missing = sorted(r for r, pid in self._ranks.items() if not is_alive(pid))
            if not missing:
                self._complete_at = now
            elif now > self._complete_at + GRACE_S:
                self._fail(f"{named(missing)} ended before all had started")

    def _lost_a_rank_at_start(self) -> bool:
        """Whether the command has ended because a rank was killed before all had met."""
        killed = self._command.launcher == "local" and self.exit_code > 128
        return killed and not self.met and self.stopped_by is None

    def _fail(self, message: str) -> None:
        self.failure = message
        self._terminate()

    def _ask_stop(self, signum: signal.Signals) -> None:
        if self._command.forwards_signals:
            self._child.send_signal(signum)
        else:
            send(self._local_pids.intersection(marked(self._mark)), signum)

    def _terminate(self) -> None:
        if self._command.launcher != "mpi":
            self.end()
        elif self._kill_deadline is None:
            self._child.terminate()
            self._kill_deadline = time.monotonic() + GRACE_S
