"""A rank's end of the socket to the supervisor that started it, and the messages on it.

One message is one packet of JSON on a socket that the rank inherits. This module imports the
standard library only, since the supervisor must start without delay.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

MAX_BYTES = 1 << 16
"""Of one message."""

Saying = Literal["alive", "dying", "meet", "leave", "abort", "built", "agree"]


@dataclass(frozen=True)
class FromRank:
    """A message of a rank to the supervisor.

    Attributes:
        say: `meet`: it wants a group, the first one or one without those that are lost; `built`: it
            has built its part of the present one; `agree`: it has arrived where all must before
            the next loss; `leave`: it is done with its group; `abort`: all are to be ended;
            `alive`: it holds the lock whose file descriptor comes with this; `dying`: what its
            supervisor says for it when it has begun to end.
        generation: of the group that it speaks of; 0 before the first.
        takes_in: with `meet`, whether joining ranks may be in the next group.
        code: with `abort`, the exit code.
    """

    say: Saying
    generation: int
    takes_in: bool = False
    code: int = 1

    def encode(self) -> bytes:
        """As a packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> FromRank:
        """The inverse of `encode`."""
        return cls(**json.loads(packet))


@dataclass(frozen=True)
class ToRank:
    """A message of the supervisor to a rank; fields that are None are not sent.

    Attributes:
        generation: number of a new group, from 1.
        members: with `generation`, the slots of its members in the order of their ranks.
        joiner: whether a new process waits to join.
        built: number of the group that all its members have built.
        agree: number of the group whose members have all arrived.
        lost: number of the group that has lost a member or was given up.
        left: the rank's leave was noted; no message follows.
        store: with `generation`, host and port of the store, where it is not the rank's first.
    """

    generation: int | None = None
    members: tuple[int, ...] | None = None
    joiner: bool | None = None
    built: int | None = None
    agree: int | None = None
    lost: int | None = None
    left: bool | None = None
    store: tuple[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ToRank:
        """The inverse of `to_json`."""
        given = dict(values)
        for name in ("members", "store"):
            if name in values:
                given[name] = tuple(values[name])
        return cls(**given)

    def encode(self) -> bytes:
        """As a packet."""
        return json.dumps(self.to_json()).encode()

    @classmethod
    def decode(cls, packet: bytes) -> ToRank:
        """The inverse of `encode`."""
        return cls.from_json(json.loads(packet))


_LEAVE_S = 5.0


class GenerationLost(RuntimeError):
    """The present generation of the group has lost a member, or was given up."""


class Supervision:
    """Talks with the supervisor; a thread listens, whatever this process waits for.

    Args:
        fd: file descriptor of the inherited socket; stays open.
        on_loss: function called in that thread as soon as the present generation is known to be
            broken.

    Attributes:
        has_joiner: whether another process waits for the next generation.
        store: host and port of the present generation's store; None for that of the start.
    """

    def __init__(self, fd: int, on_loss: Callable[[], None]) -> None:
        os.set_inheritable(fd, False)
        self._line = socket.socket(fileno=os.dup(fd))
        self._on_loss = on_loss
        self._changed = threading.Condition()
        self._generation = 0
        self._members: list[int] = []
        self._built = self._lost = -1
        self._num_agreed = 0
        self.has_joiner = False
        self.store: tuple[str, int] | None = None
        self._has_left = False
        self._thread = threading.Thread(target=self._listen, name="supervision", daemon=True)
        self._thread.start()
        self._life = LifeLock()
        if self._life.fd >= 0:
            socket.send_fds(self._line, [FromRank("alive", 0).encode()], [self._life.fd])

    def meet(self, takes_in: bool) -> tuple[int, list[int]]:
        """Wait for the next generation: its number, and its members' slots in order.

        Args:
            takes_in: whether joining ranks may be among the members.
        """
        known = self._generation
        self._say("meet", takes_in=takes_in)
        with self._changed:
            self._changed.wait_for(lambda: self._generation > known)
            return self._generation, self._members

    def wait(self, is_done: Callable[[], bool]) -> bool:
        """Wait until `is_done` or the present generation is lost: false for the latter alone."""
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._is_lost())
            return is_done()

    def notify(self) -> None:
        """Have `wait` check its condition again."""
        with self._changed:
            self._changed.notify_all()

    def confirm(self) -> None:
        """Say that this rank has built the present generation, and wait for the others to.

        Raises:
            GenerationLost: on all survivors, or on none.
        """
        self._say("built")
        if not self.wait(lambda: self._built == self._generation):
            raise GenerationLost("a rank died while the group was built")

    def agree(self) -> None:
        """Return when all ranks have called this.

        Raises:
            GenerationLost: on all survivors, or on none.
        """
        wanted = self._num_agreed + 1
        self._say("agree")
        # What was agreed before a loss holds: all ranks get the messages in the same order.
        if not self.wait(lambda: self._num_agreed == wanted):
            raise GenerationLost("a rank died")

    def is_lost(self, patience_s: float = 0.0) -> bool:
        """Whether the present generation is broken, or turns out to be within `patience_s`."""
        with self._changed:
            return self._changed.wait_for(self._is_lost, patience_s)

    def leave(self) -> None:
        """Tell the supervisor that this rank leaves in order, so that its end is not a loss."""
        self._say("leave")
        self._thread.join(_LEAVE_S)
        self._life.release()
        if not self._thread.is_alive():
            self._line.close()

    def abort(self, exit_code: int) -> None:
        """Have the supervisor end all ranks."""
        self._say("abort", code=exit_code)

    def _is_lost(self) -> bool:
        return self._lost == self._generation

    def _say(self, saying: Saying, takes_in: bool = False, code: int = 1) -> None:
        # If nobody listens any more, this process is being ended: a traceback would only hide why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._line.send(FromRank(saying, self._generation, takes_in, code).encode())

    def _listen(self) -> None:
        while not self._has_left:
            packet = b""
            with contextlib.suppress(ConnectionResetError):  # it has died before it read all
                packet = self._line.recv(MAX_BYTES)
            if not packet:  # the supervisor has died, and this process will in a moment
                return
            self._hear(ToRank.decode(packet))

    def _hear(self, message: ToRank) -> None:
        with self._changed:
            if message.generation is not None and message.members is not None:
                self._generation, self._members = message.generation, list(message.members)
                self._num_agreed = 0
                self.has_joiner = False
                self.store = message.store
            if message.joiner is not None:
                self.has_joiner = message.joiner
            if message.built is not None:
                self._built = message.built
            if message.agree is not None:
                self._num_agreed += 1
            if message.lost is not None:
                self._lost = message.lost
            self._has_left = message.left is not None
            self._changed.notify_all()
        if message.lost is not None:
            self._on_loss()


_NUM_BYTES = mmap.PAGESIZE
_ATTRIBUTE_BYTES = 64
"""More than any `pthread_mutexattr_t` has."""
_SHARED, _ROBUST = 1, 1
_OWNER_DIED = 130
"""EOWNERDEAD of Linux."""


class LifeLock:
    """A lock that the thread which makes it holds until `release`, or its end.

    By it others notice at once that its holder has begun to end. A killed process closes its
    connections, and its parent hears of its end, only when all its memory is free: 15 to 70 ms
    later where torch was imported, and more with large tensors. Before that the kernel marks the
    robust mutexes that it holds, and wakes who waits for them, within 0.1 ms
    (`pthread_mutexattr_setrobust(3)`; `exit_robust_list` in Linux's kernel/futex/core.c).

    Attributes:
        fd: file descriptor of its memory, for `watch` in another process; -1 where the system has
            no such locks.
    """

    def __init__(self) -> None:
        self.fd = -1
        # Without it deaths are noticed as the parent of any process notices them.
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._lock()

    def _lock(self) -> None:
        fd = os.memfd_create("lockstep-life")
        os.ftruncate(fd, _NUM_BYTES)
        self._memory = mmap.mmap(fd, _NUM_BYTES)
        self._mutex, attribute, libc = _address(self._memory), _attribute(), ctypes.CDLL(None)
        libc.pthread_mutexattr_init(attribute)
        libc.pthread_mutexattr_setpshared(attribute, _SHARED)
        is_robust = libc.pthread_mutexattr_setrobust(attribute, _ROBUST) == 0
        if not is_robust or libc.pthread_mutex_init(self._mutex, attribute):
            os.close(fd)
            return
        libc.pthread_mutex_lock(self._mutex)
        self.fd = fd

    def release(self) -> None:
        """Let who watches it know that this was no death."""
        if self.fd >= 0:
            ctypes.CDLL(None).pthread_mutex_unlock(self._mutex)
            os.close(self.fd)
            self.fd = -1


def watch(fd: int, on_death: Callable[[], None]) -> None:
    """Have a thread call a function as soon as the holder of a lock begins to end.

    Args:
        fd: file descriptor of the lock's memory; closed here.
        on_death: called in that thread; not after `release`.
    """
    with open(fd, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), _NUM_BYTES)
    mutex, libc = _address(memory), ctypes.CDLL(None)

    def wait() -> None:
        if libc.pthread_mutex_lock(mutex) == _OWNER_DIED:
            on_death()
        libc.pthread_mutex_unlock(mutex)  # before its memory goes
        memory.close()

    threading.Thread(target=wait, name="deaths", daemon=True).start()


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def _attribute() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
