"""The supervisor of ranks that Lockstep starts itself on this host, and that survive a lost rank.

It starts the ranks, hosts the key-value store in which they find each other, notices at once when
one of them dies, and notifies the others, over a socket that each rank inherits. All decisions on
which ranks must agree are made here, one after the other, so survivors need no agreement among
themselves: who belongs to a generation of the group, whether it is complete, and whether all have
reached a point before the next loss.

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
from collections.abc import Iterable, Sequence

from lockstep.comm.torchdist.supervision import MAX_BYTES, FromRank, ToRank

PREFIX = "LOCKSTEP_LOCAL_"
"""Prefix of the environment variables with the place of a rank."""

RANK, SIZE = f"{PREFIX}RANK", f"{PREFIX}SIZE"
"""A process's number, from 0, and how many processes are started first."""

HOST = "127.0.0.1"

PORT = f"{PREFIX}PORT"
"""TCP port of the store on `HOST`."""

SUPERVISOR = f"{PREFIX}SUPERVISOR"
"""The inherited file descriptor of the socket to the supervisor."""

VARIABLES = (RANK, SIZE, PORT, SUPERVISOR)

PLACE = f"{PREFIX}PLACE"
"""Set for a process that is started later: the rank whose local rank it takes."""

_GRACE_S = 3.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Starts ranks and supervises them to their end.

    Generations of the group are numbered from 1. One is *whole* when all its members have built
    it, and *broken* as soon as a member is lost or has given it up.

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
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(False)
        wake.setblocking(False)
        self._waker = wake
        # A signal writes to this socket, and so wakes `select`. For SIGCHLD, Python does so only if
        # there is a handler, even an empty one.
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in _FORWARDED:
            signal.signal(signum, self._forward)
        self._listener = socket.create_server((HOST, 0), backlog=num_ranks + 16)
        self._port = self._listener.getsockname()[1]
        self._size, self._argv, self._replacements = num_ranks, argv, replacements
        self._fds = fds
        self._ranks = [
            SupervisedRank(slot, num_ranks, self._port, argv, fds) for slot in range(num_ranks)
        ]
        self._selector = selectors.DefaultSelector()
        self._is_over = False
        self._generation = 0
        self._members: set[int] = set()
        self._built: set[int] = set()
        self._arrived: set[int] = set()
        self._broken = True
        self._first_failure: SupervisedRank | None = None
        self._end_at: float | None = None
        self._aborted: int | None = None

    def run(self) -> int:
        """Serve until all ranks have ended; the exit code."""
        # In a thread: importing torch takes as long as the ranks' own start, and meanwhile they are
        # served here.
        threading.Thread(target=self._host_store, daemon=True).start()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for rank in self._ranks:
            self._selector.register(rank.line, selectors.EVENT_READ, rank)
        while any(rank.is_alive for rank in self._ranks):
            for key, _ in self._selector.select(self._patience()):
                if key.data is not None:
                    self._listen(key.data)
                    # A closed line is always readable: `select` would return at once for ever.
                    if key.data.is_silent:
                        self._selector.unregister(key.data.line)
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
            for rank in tuple(self._ranks):
                if rank.is_alive and rank.process.poll() is not None:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(rank.line)
                    self._handle_exit(rank)
            if self._end_at is not None and time.monotonic() > self._end_at:
                self._end()
        return self._exit_code()

    def _host_store(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        host, port = self._listener.getsockname()
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )  # fmt: skip

    def _patience(self) -> float | None:
        return None if self._end_at is None else max(0.0, self._end_at - time.monotonic()) + 0.01

    def _forward(self, signum: int, frame: object) -> None:
        for rank in self._ranks:
            if rank.is_alive:
                rank.process.send_signal(signum)

    def _listen(self, rank: SupervisedRank) -> None:
        for message in rank.read():
            is_current = message.generation == self._generation
            if message.say == "meet":
                rank.takes_in = message.takes_in
                self._meet(rank)
            elif message.say == "leave":
                rank.phase = "out"
                # Later messages to the members are not for its next group.
                self._members.discard(rank.slot)
                rank.tell(ToRank(left=True))
                self._dismiss()
            elif message.say == "abort":
                self._aborted = message.code
                self._end()
            elif is_current and not self._broken:
                has_built = message.say == "built"
                arrived = self._built if has_built else self._arrived
                arrived.add(rank.slot)
                # All get the messages in one order: a point that all have reached counts, even if a
                # loss comes next.
                if arrived == self._members:
                    arrived.clear()
                    number = self._generation
                    self._tell(
                        self._members, ToRank(built=number) if has_built else ToRank(agree=number)
                    )

    def _meet(self, rank: SupervisedRank) -> None:
        """Handle a rank's request for a group: the first one, or one without the lost ranks."""
        if rank.slot in self._members:  # a request for a new group gives up the present one
            self._break()
        elif rank.phase == "starting":
            self._tell(self._members, ToRank(joiner=True))
        if rank.phase == "out":  # the first training of a script, or one after another
            self._is_over = False
        rank.phase = "waiting"
        self._form()

    def _dismiss(self) -> None:
        """The run is over: end the processes that have not yet taken part in it.

        A new process would begin with the script's first training, so none is started from now on.
        """
        self._is_over = True
        self._replacements = 0
        for rank in self._ranks:
            if rank.slot >= self._size and rank.phase in ("starting", "waiting"):
                rank.phase = "lost"
                rank.process.kill()

    def _break(self) -> None:
        if not self._broken:
            self._broken = True
            self._tell(self._members, ToRank(lost=self._generation))

    def _form(self) -> None:
        """Begin a generation of all living ranks, if all of them wait for it."""
        living = [rank for rank in self._ranks if rank.is_alive and rank.phase != "starting"]
        if not all(rank.takes_in for rank in living):
            living = [rank for rank in living if not rank.is_new]
        if self._is_over or not living or any(rank.phase != "waiting" for rank in living):
            return
        # Later on survivors may be fewer; but a training does not start without all its ranks.
        if self._generation == 0 and len(living) < self._size:
            self._give_up(next(rank for rank in self._ranks if not rank.is_alive))
            return
        self._generation += 1
        self._members = {rank.slot for rank in living}
        self._built, self._arrived = set(), set()
        self._broken = False
        for rank in living:
            rank.phase, rank.is_new = "in", False
        members = tuple(sorted(self._members))
        self._tell(members, ToRank(generation=self._generation, members=members))
        if any(rank.phase == "waiting" for rank in self._ranks):
            self._tell(self._members, ToRank(joiner=True))

    def _tell(self, slots: Iterable[int], message: ToRank) -> None:
        for slot in slots:
            if self._ranks[slot].is_alive:
                self._ranks[slot].tell(message)

    def _handle_exit(self, rank: SupervisedRank) -> None:
        """Handle the end of a rank: notify the others, replace it, or begin a new group."""
        self._listen(rank)  # it may have left in order just before
        rank.line.close()
        rank.is_alive = False
        if rank.phase != "out":
            rank.phase = "lost"
            if rank.slot in self._members:
                self._break()
            # Only what a signal has killed is replaced: a joining rank that the others refuse ends
            # by itself (`ElasticTransport.withdraw`).
            if self._generation and rank.exit_code > 128:
                self._replace(rank)
        if self._generation == 0 and rank.exit_code:
            self._give_up(rank)
        else:
            self._form()

    def _replace(self, lost: SupervisedRank) -> None:
        """Start a process in the place of a killed one, while the others train."""
        if self._is_over or self._replacements == 0 or self._aborted is not None:
            return
        if not any(rank.is_alive and rank.phase in ("in", "waiting") for rank in self._ranks):
            return
        self._replacements -= 1
        new = SupervisedRank(
            len(self._ranks), self._size, self._port, self._argv, self._fds, lost.place
        )
        self._ranks.append(new)
        self._selector.register(new.line, selectors.EVENT_READ, new)

    def _give_up(self, rank: SupervisedRank) -> None:
        """End the start of the ranks: the others cannot start without this one."""
        if self._first_failure is None:
            self._first_failure = rank
            # The others may be about to fail for the same reason, which rank 0 prints.
            self._end_at = time.monotonic() + (0 if rank.exit_code > 128 else _GRACE_S)

    def _end(self) -> None:
        self._end_at = None
        if self._first_failure is not None:
            slot, code = self._first_failure.slot, self._first_failure.exit_code
            print(f"rank {slot} ended (exit code {code}) before all had started", file=sys.stderr)
        for rank in self._ranks:
            if rank.is_alive:
                rank.process.kill()

    def _exit_code(self) -> int:
        """Exit code of the run; ranks that the others have survived do not count."""
        if self._aborted is not None:
            return self._aborted
        if self._first_failure is not None:
            return self._first_failure.exit_code or 1
        ended = [rank for rank in self._ranks if rank.phase != "lost"]
        return max(rank.exit_code for rank in ended or self._ranks)


class SupervisedRank:
    """A process of a rank, and its state.

    Args:
        slot: its number, from 0.
        size: number of processes that are started first.
        port: TCP port of the store on `HOST`.
        argv: program and arguments.
        fds: file descriptors of this process that it inherits.
        place: rank whose local rank it takes, if it is started later.

    Attributes:
        slot: its number.
        line: this end of the socket to it.
        process: the process itself.
        place: rank, among those that were started first, whose local rank it takes.
        phase: `starting` while others train, `out` of any group, `waiting` for one, `in` one, or
            `lost`.
        is_alive: whether the supervisor has not yet noticed its end.
        is_silent: whether it has closed its end of the socket.
        is_new: whether it has yet to be taken into a group by the ranks that were started first.
        takes_in: whether it waits for a group that may have joining ranks.
    """

    def __init__(
        self,
        slot: int,
        size: int,
        port: int,
        argv: Sequence[str],
        fds: Sequence[int],
        place: int | None = None,
    ) -> None:
        self.slot = slot
        self.place = slot if place is None else place
        self.phase = "out" if place is None else "starting"
        self.is_alive = True
        self.is_silent = self.takes_in = False
        self.is_new = place is not None
        # A socket that keeps messages apart: each `recv` returns exactly one.
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        variables = {RANK: slot, SIZE: size, PORT: port, SUPERVISOR: theirs.fileno()}
        if place is not None:
            variables[PLACE] = place
        with theirs:  # closed here once it is inherited, so that the rank's end closes the line
            self.process = subprocess.Popen(
                argv,
                env=os.environ | {name: str(value) for name, value in variables.items()},
                pass_fds=(theirs.fileno(), *fds),
            )

    @property
    def exit_code(self) -> int:
        """Exit code as shells have it: 128 + the number of a signal."""
        code = self.process.returncode or 0
        return 128 - code if code < 0 else code

    def tell(self, message: ToRank) -> None:
        """Send it a message."""
        with contextlib.suppress(OSError):  # it has died, as the supervisor will notice soon
            self.line.send(message.encode())

    def read(self) -> list[FromRank]:
        """The messages that it has sent by now."""
        messages = []
        with contextlib.suppress(OSError):
            while packet := self.line.recv(MAX_BYTES):
                messages.append(FromRank.decode(packet))
            self.is_silent = True
        return messages


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules would hide others of their names
    _num_ranks, _replacements, _fds = sys.argv[1:4]
    _inherited = [int(fd) for fd in _fds.split(",") if fd]
    code = Supervisor(int(_num_ranks), sys.argv[4:], int(_replacements), _inherited).run()
    sys.stderr.flush()
    os._exit(code)  # the store's threads may be anywhere
