"""A rank's end of the socket to the supervisor that started it (`launch.host.supervisor`)."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

_MESSAGE_BYTES = 1 << 16
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
        has_newcomer: whether another process waits for the next generation.
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
        self.has_newcomer = False
        self._has_left = False
        self._thread = threading.Thread(target=self._listen, name="supervision", daemon=True)
        self._thread.start()

    def meet(self, takes_in: bool) -> tuple[int, list[int]]:
        """Wait for the next generation: its number, and its members' slots in order.

        Args:
            takes_in: whether newcomers may be among the members.
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
        # What was agreed before a loss holds: the supervisor tells everyone in the same order.
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
        if not self._thread.is_alive():
            self._line.close()

    def abort(self, exit_code: int) -> None:
        """Have the supervisor end all ranks."""
        self._say("abort", code=exit_code)

    def _is_lost(self) -> bool:
        return self._lost == self._generation

    def _say(self, what: str, **more: Any) -> None:
        message = {"say": what, "generation": self._generation, **more}
        self._line.send(json.dumps(message).encode())

    def _listen(self) -> None:
        while not self._has_left:
            data = self._line.recv(_MESSAGE_BYTES)
            if not data:  # the supervisor has died, and this process will in a moment
                return
            self._hear(json.loads(data))

    def _hear(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "members" in message:
                self._generation, self._members = message["generation"], message["members"]
                self._num_agreed = 0
                self.has_newcomer = False
            self.has_newcomer = message.get("newcomer", self.has_newcomer)
            self._built = message.get("built", self._built)
            self._num_agreed += "agree" in message
            self._lost = message.get("lost", self._lost)
            self._has_left = "left" in message
            self._changed.notify_all()
        if "lost" in message:
            self._on_loss()
