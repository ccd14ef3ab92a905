"""What a server raises in a process that it has forked; of no imports, since any command has it."""

from __future__ import annotations

from typing import Any


class Forked(BaseException):
    """Raised in a forked process, so that it leaves all that the server's frames hold.

    Attributes:
        order: what its stand-in has sent.
        fds: the open files that came with it.
    """

    def __init__(self, order: dict[str, Any], fds: list[int]) -> None:
        super().__init__("a forked process has to be run")
        self.order, self.fds = order, fds
