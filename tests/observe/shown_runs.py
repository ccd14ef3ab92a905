"""Runs shown on consoles in memory and on terminals of their own."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from sample_events import joined

from lockstep.engine.events import Event
from lockstep.observe.showing.console import ConsoleView

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\s\S]")


def screen(output: str, width: int) -> list[str]:
    """The lines that a terminal shows in the end, with those that have scrolled out of sight.

    It knows what `rich` sends: moves of the cursor upwards, and erasing of a line.
    """
    lines: list[list[str]] = [[]]
    y = x = 0
    for token in _TOKEN.finditer(output):
        if token[2] == "A":
            y -= int(token[1] or 1)
            assert y >= 0, "the cursor would leave the terminal"
        elif token[2] == "K":
            lines[y] = []
        elif token[0] == "\r":
            x = 0
        elif token[2] is None:
            if token[0] == "\n" or x == width:
                y, x = y + 1, 0
                lines.extend([] for _ in range(y + 1 - len(lines)))
            if token[0] != "\n":
                lines[y].extend(" " * (x + 1 - len(lines[y])))
                lines[y][x] = token[0]
                x += 1
    shown = ["".join(line).rstrip() for line in lines]
    while shown and not shown[-1]:
        shown.pop()
    return shown


def _own_terminal(follower: int) -> None:
    """In a process that starts: have Ctrl-C on this terminal reach it."""
    os.setsid()
    fcntl.ioctl(follower, termios.TIOCSCTTY, 0)


class Pty:
    """A program on a terminal of its own.

    Args:
        code: the program, in Python; it can import what stands beside this file.
        width: columns of the terminal, which has 24 rows.
        environ: environment variables that the program gets beside those of this process.
    """

    def __init__(self, code: str, width: int = 80, **environ: str) -> None:
        source = Path(__file__).parents[2] / "src"
        left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        env = {k: v for k, v in os.environ.items() if k not in left_out}
        env |= {"TERM": "xterm-256color", "PYTHONPATH": f"{source}:{Path(__file__).parent}"}
        self._leader, follower = pty.openpty()
        self.resize(width)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=env | environ,
            preexec_fn=lambda: _own_terminal(follower),
        )
        os.close(follower)

    def type(self, keys: bytes) -> None:
        """Type something on the terminal, such as Ctrl-C."""
        os.write(self._leader, keys)

    def resize(self, width: int) -> None:
        """Give the terminal another number of columns."""
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def output(self, meanwhile: Callable[[bytes], None] = lambda shown: None) -> bytes:
        """All that the program has written when it has ended.

        Args:
            meanwhile: function that is called with what is there so far, again and again.
        """
        shown = b""
        while block := self._read():
            shown += block
            meanwhile(shown)
        os.close(self._leader)
        self.process.wait(10)
        return shown

    def hang_up_at(self, sign: bytes) -> None:
        """Take the terminal away from the program when it has written `sign`."""
        shown = b""
        while sign not in shown:
            block = self._read()
            assert block, shown
            shown += block
        os.close(self._leader)

    def _read(self) -> bytes:
        try:
            return os.read(self._leader, 4096)
        except OSError:  # Linux says so that the other end has been closed
            return b""


class Shown:
    """A view on a console in memory, with a clock that stands still until told."""

    def __init__(
        self,
        *,
        terminal: bool = False,
        width: int = 100,
        show_failure: bool = False,
        resumable: bool = True,
        interval_s: float = 2.0,
        per_rank: bool = False,
        verbose: bool = False,
    ) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=terminal, width=width, height=30, _environ={}
        )
        self.view = ConsoleView(
            self.console,
            show_failure=show_failure,
            resumable=resumable,
            interval_s=interval_s,
            per_rank=per_rank,
            verbose=verbose,
            clock=lambda: self.now,
        )

    def __call__(self, *events: Event) -> Shown:
        for event in events:
            self.view(event)
        return self

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    @property
    def screen(self) -> list[str]:
        """What a terminal has on it in the end, scroll-back included."""
        return screen(self.file.getvalue(), self.console.width)

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.file.getvalue(), re.MULTILINE))


def ranks(*hosts: str) -> list[Event]:
    return [joined(rank, host) for rank, host in enumerate(hosts)]
