"""The supervisor of ranks that Lockstep starts itself on this host, and that survive a lost rank.

It starts the ranks, hosts the key-value store in which they find each other, notices at once when
one of them dies, and notifies the others, over a socket that each rank inherits. What it tells them
is decided in `group.py`.

This file is run as a script that imports nothing slow, so that ranks start without delay.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from lockstep.comm.torchdist.supervision import MAX_BYTES, FromRank, ToRank, watch
from lockstep.launching.host.group import KILLED, Group, Order
from lockstep.launching.host.processes import shell_code

PREFIX = "LOCKSTEP_LOCAL_"
"""Prefix of the environment variables with the place of a rank."""

RANK, SIZE = f"{PREFIX}RANK", f"{PREFIX}SIZE"
"""A process's number, from 0, and how many processes are started first."""

HOST = "127.0.0.1"

PORT = f"{PREFIX}PORT"
"""TCP port of the store."""

SUPERVISOR = f"{PREFIX}SUPERVISOR"
"""The inherited file descriptor of the socket to the supervisor."""

VARIABLES = (RANK, SIZE, PORT, SUPERVISOR)

PLACE = f"{PREFIX}PLACE"
"""Set for a process that is started later: the rank whose local rank it takes."""

STORE, ADDRESS = f"{PREFIX}STORE", f"{PREFIX}ADDRESS"
"""Address of the store's host and of this one; `HOST` if not set."""

RANKS = f"{PREFIX}RANKS"
"""Number of ranks on each host; `SIZE` if not set."""

RESUMES = f"{PREFIX}RESUMES"
"""Set where all ranks of a run were lost, and start again from its newest checkpoint."""

TIMEOUT = f"{PREFIX}TIMEOUT"
"""Seconds after which a host that does not answer is lost; not set on one host."""

_GRACE_S = 3.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Report: TypeAlias = "tuple[int, FromRank | int]"
"""What a process has said, or the exit code that it has ended with."""


class Leader(ABC):
    """Leads a group of ranks: hands reports on to it, and gives a start up after some patience.

    Args:
        size: number of ranks that are started first.
        replacements: greatest number of processes to start in the place of killed ones.
    """

    def __init__(self, size: int, replacements: int) -> None:
        self._group = Group(size)
        self._replacements = replacements
        self._end_at: float | None = None
        self._has_given_up = False

    @abstractmethod
    def carry_out(self, orders: Iterable[Order]) -> None:
        """Tell processes something, or kill them."""

    @abstractmethod
    def replace(self, lost: int) -> bool:
        """Start a process in the place of a killed one, while the others train.

        Returns:
            Whether there is now one.
        """

    @property
    def patience_s(self) -> float | None:
        """Seconds until `look_at_clock` must be called; None if it need not be."""
        return None if self._end_at is None else max(0.0, self._end_at - time.monotonic()) + 0.01

    def handle(self, report: Report) -> None:
        """Have the group take note of something, and do what follows from it."""
        slot, said = report
        if isinstance(said, FromRank):
            self.carry_out(self._group.hear(slot, said))
        else:
            self.carry_out(self._group.lose(slot, said))
            if self._replacements and self._group.is_replaceable(slot):
                self._replacements -= self.replace(slot)
        if self._group.failed is not None and not self._has_given_up:
            self._has_given_up = True
            # The others may be about to fail for the same reason, which rank 0 prints.
            grace_s = 0.0 if self._group.failed[1] > KILLED else _GRACE_S
            self._end_at = time.monotonic() + grace_s

    def look_at_clock(self) -> None:
        """End ranks that cannot start, when that is due."""
        if self._end_at is None or time.monotonic() <= self._end_at:
            return
        self._end_at = None
        if self._group.failed is not None:
            slot, code = self._group.failed
            print(f"rank {slot} ended (exit code {code}) before all had started", file=sys.stderr)
        self.carry_out(self._group.end())


class Supervisor(Leader):
    """Starts ranks of this host and supervises them to their end.

    Args:
        num_ranks: number of ranks to start.
        argv: program and arguments that each rank runs.
        replacements: greatest number of processes to start in the place of killed ones.
        fds: file descriptors of this process that all of them inherit.
    """

    def __init__(
        self,
        num_ranks: int,
        argv: Sequence[str],
        replacements: int = 0,
        fds: Sequence[int] = (),
    ) -> None:
        super().__init__(num_ranks, replacements)
        self._processes = Processes(argv, fds)
        self._listener = socket.create_server((HOST, 0), backlog=num_ranks + 16)
        self._variables = {SIZE: num_ranks, PORT: self._listener.getsockname()[1]}
        self._places = list(range(num_ranks))
        for slot in range(num_ranks):
            self._processes.start(slot, self._variables)

    def run(self) -> int:
        """Serve until all ranks have ended; the exit code."""
        # In a thread: importing torch takes as long as the ranks' own start, and meanwhile they are
        # served here.
        threading.Thread(target=self._host_store, daemon=True).start()
        while not self._group.is_ended:
            for report in self._processes.wait(self.patience_s):
                self.handle(report)
            self.look_at_clock()
        return self._group.exit_code

    def carry_out(self, orders: Iterable[Order]) -> None:
        """See `Leader.carry_out`."""
        for order in orders:
            self._processes.carry_out(order)

    def replace(self, lost: int) -> bool:
        """See `Leader.replace`."""
        self._places.append(self._places[lost])
        self._processes.start(self._group.add(), self._variables | {PLACE: self._places[lost]})
        return True

    def _host_store(self) -> None:
        self._store = hosted_store(self._listener)


def hosted_store(listener: socket.socket) -> object:
    """The store in which ranks find each other, on a socket that listens; imports torch."""
    from torch._C._distributed_c10d import TCPStore

    host, port = listener.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Processes:
    """The ranks' processes on this host: what they say, that they end, and signals for them.

    It belongs to the main thread, and outlives no other one that it was made in.

    Args:
        argv: program and arguments of each.
        fds: file descriptors of this process that all of them inherit.
        has_terminal: whether this process may have one: its Ctrl-C must not reach them twice.
        streams: file descriptors of their standard output and error; None for those of this
            process.

    Attributes:
        unheard: the newest signal that came when there was no process to forward it to.
        forwarded: the newest one that was forwarded.
    """

    def __init__(
        self,
        argv: Sequence[str],
        fds: Sequence[int] = (),
        has_terminal: bool = False,
        streams: tuple[int, int] | None = None,
    ) -> None:
        self.unheard: int | None = None
        self._streams = streams or (None, None)
        self.forwarded: int | None = None
        self._argv, self._fds, self._has_terminal = argv, fds, has_terminal
        self._ranks: dict[int, SupervisedRank] = {}
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(False)
        wake.setblocking(False)
        self._waker = wake
        # A signal writes to this socket, and so wakes `select`. For SIGCHLD, Python does so only if
        # there is a handler, even an empty one.
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in _FORWARDED:
            if not (has_terminal and signal.getsignal(signum) is signal.SIG_IGN):  # nohup
                signal.signal(signum, self.forward)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._dying: SimpleQueue[int] = SimpleQueue()

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._ranks)

    def start(self, slot: int, variables: Mapping[str, object]) -> None:
        """Start one; `variables` are environment variables besides those of this process."""
        rank = SupervisedRank(
            slot, self._argv, variables, self._fds, self._has_terminal, self._streams,
            self._note_dying,
        )  # fmt: skip
        self._ranks[slot] = rank
        self._selector.register(rank.line, selectors.EVENT_READ, rank)

    def carry_out(self, order: Order) -> None:
        """Tell one something, or kill it, unless it has ended."""
        rank = self._ranks.get(order.slot)
        if rank is not None and order.message is not None:
            rank.tell(order.message)
        elif rank is not None:
            rank.process.kill()

    def watch(self, line: socket.socket | int) -> None:
        """Have `wait` return when there is something to read on a socket or pipe, too."""
        self._selector.register(line, selectors.EVENT_READ)

    def forget(self, line: socket.socket | int) -> None:
        """Undo `watch`, if that was called."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(line)

    def kill(self) -> list[int]:
        """Kill all, and wait until they have ended; their slots."""
        slots = list(self._ranks)
        for rank in self._ranks.values():
            rank.process.kill()
        for rank in list(self._ranks.values()):
            rank.process.wait()
            self._end(rank)
        return slots

    def wait(self, patience_s: float | None) -> list[Report]:
        """What they have said, and which have ended, as soon as there is something.

        Args:
            patience_s: seconds after which this returns in any case; None for no limit.
        """
        reports: list[Report] = []
        for key, _ in self._selector.select(patience_s):
            if isinstance(key.data, SupervisedRank):
                reports += key.data.reports()
                # A closed line is always readable: `select` would return at once for ever.
                if key.data.is_silent:
                    self._selector.unregister(key.data.line)
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while not self._dying.empty():
            slot = self._dying.get()
            if dying := self._ranks.get(slot):
                reports += [*dying.reports(), (slot, FromRank("dying", 0))]
        for rank in tuple(self._ranks.values()):
            if rank.process.poll() is not None:
                reports += rank.reports()  # it may have left in order just before
                self._end(rank)
                reports.append((rank.slot, rank.exit_code))
        return reports

    def _note_dying(self, slot: int) -> None:
        """Have `wait` say that one has begun to end; called by any thread."""
        if dying := self._ranks.get(slot):
            dying.is_dying = True
        self._dying.put(slot)
        with contextlib.suppress(OSError):  # there is enough in it to wake `wait`
            self._waker.send(b"d")

    def _end(self, rank: SupervisedRank) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(rank.line)
        rank.line.close()
        del self._ranks[rank.slot]

    def forward(self, signum: int, frame: object = None) -> None:
        """Send a signal to all; also what this process does with one that it gets."""
        living = [rank for rank in tuple(self._ranks.values()) if not rank.is_dying]
        if living:
            self.forwarded = signum
        else:
            self.unheard = signum
        for rank in living:
            rank.process.send_signal(signum)


class SupervisedRank:
    """A process of a rank on this host.

    Args:
        slot: its number.
        argv: program and arguments.
        variables: environment variables besides those of this process.
        fds: file descriptors of this process that it inherits.
        is_apart: whether no terminal's signals reach it.
        streams: file descriptors of its standard output and error; None for those of this process.
        on_dying: called in another thread with its number, when it has begun to end.

    Attributes:
        slot: its number.
        line: this end of the socket to it.
        process: the process itself.
        is_silent: whether it has closed its end of the socket.
        is_dying: whether it has begun to end, and hears no signals any more.
    """

    def __init__(
        self,
        slot: int,
        argv: Sequence[str],
        variables: Mapping[str, object],
        fds: Sequence[int],
        is_apart: bool,
        streams: tuple[int | None, int | None],
        on_dying: Callable[[int], None],
    ) -> None:
        self.slot = slot
        self._on_dying = on_dying
        self.is_silent = self.is_dying = False
        # A socket that keeps messages apart: each `recv` returns exactly one.
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        own = {RANK: slot, SUPERVISOR: theirs.fileno(), **variables}
        with theirs:  # closed here once it is inherited, so that the rank's end closes the line
            self.process = subprocess.Popen(
                argv,
                env=os.environ | {name: str(value) for name, value in own.items()},
                pass_fds=(theirs.fileno(), *fds),
                stdout=streams[0],
                stderr=streams[1],
                start_new_session=is_apart,
            )

    @property
    def exit_code(self) -> int:
        """Exit code as shells have it: 128 + the number of a signal."""
        return shell_code(self.process.returncode or 0)

    def tell(self, message: ToRank) -> None:
        """Send it a message."""
        with contextlib.suppress(OSError):  # it has died, as will be noticed soon
            self.line.send(message.encode())

    def reports(self) -> list[Report]:
        """The messages that it has sent by now."""
        reports: list[Report] = []
        with contextlib.suppress(OSError):
            while True:
                packet, fds, _, _ = socket.recv_fds(self.line, MAX_BYTES, 1)
                for fd in fds:
                    with contextlib.suppress(OSError, RuntimeError):  # no memory, or no thread
                        watch(fd, partial(self._on_dying, self.slot))
                if not packet:
                    break
                message = FromRank.decode(packet)
                if message.say != "alive":
                    reports.append((self.slot, message))
            self.is_silent = True
        return reports


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules would hide others of their names
    _num_ranks, _replacements, _fds = sys.argv[1:4]
    _inherited = [int(fd) for fd in _fds.split(",") if fd]
    code = Supervisor(int(_num_ranks), sys.argv[4:], int(_replacements), _inherited).run()
    sys.stderr.flush()
    os._exit(code)  # the store's threads may be anywhere
