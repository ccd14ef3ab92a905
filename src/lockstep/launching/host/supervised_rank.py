"""A rank as its supervisor sees it: the process, its environment variables and its state.

This file is imported by a script that imports nothing slow (`supervisor.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence

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
        is_alive: whether the process has not ended, as far as the supervisor has noticed.
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
