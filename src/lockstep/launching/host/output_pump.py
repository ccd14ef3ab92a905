"""Standard output and standard error whose writers never wait for the reader.

A reader may stop reading for minutes: a pager, Ctrl-S on a terminal, a slow `tee`. A process that
prints then waits in the kernel. A launcher that waits neither watches its ranks nor reads their
output, and a rank that waits looks like one that hangs. So output passes through a buffer of
bounded size to a thread, and only that thread waits.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

MAX_BYTES = 8 << 20
"""Bytes of output that are kept while the reader does not read; the oldest are dropped first."""

PATIENCE_S = 60.0
"""Seconds that the end of a process waits for a reader that takes nothing at all."""

_PROMPT_S = 0.05
"""Seconds that a writer waits for its text to be written: so output from just before a crash is not
lost, and the texts of both streams keep their order."""

_WRITE_BYTES = 1 << 16


class OutputPump(io.RawIOBase):
    """The writable end of a file descriptor whose reader may stop reading.

    Args:
        fd: file descriptor; it is not closed by this object.
        name: name of the stream, for the message about dropped output.
        max_bytes: greatest number of bytes that are kept.
    """

    def __init__(self, fd: int, name: str, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self._fd, self._name, self._max_bytes = fd, name, max_bytes
        self._pid = os.getpid()
        # Reentrant: a signal handler that prints may interrupt `write` at any line.
        self._changed = threading.Condition(threading.RLock())
        self._kept: deque[bytes] = deque()
        self._num_kept = 0
        self._num_dropped = 0
        self._is_writing = self._is_late = self._is_over = False
        self._progress_at = time.monotonic()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """The file descriptor that the output goes to."""
        return self._fd

    def isatty(self) -> bool:
        """Whether the output goes to a terminal."""
        return os.isatty(self._fd)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Take all of `data`, and wait for a moment until it is written.

        Raises:
            OSError: it, or what came before it, cannot be written: the reader is gone.
        """
        data = bytes(data)
        if self._is_over or os.getpid() != self._pid:  # a forked process has none of the threads
            _write_all(self._fd, data)
            return len(data)
        with self._changed:
            self._raise_error()
            if data:  # an empty piece would mark the end
                self._keep(data)
            # Once only: a writer of a thousand lines must not wait a thousand times.
            if not self._is_late:
                self._is_late = not self._changed.wait_for(self._is_idle, _PROMPT_S)
            self._raise_error()
        return len(data)

    def finish(self, patience_s: float = PATIENCE_S) -> int:
        """Wait until all is written, while the reader goes on reading; then accept nothing more.

        Args:
            patience_s: seconds to wait for a reader that takes nothing at all.

        Returns:
            The number of lines that were dropped without a message about it.
        """
        with self._changed:
            try:
                while not self._is_idle():
                    left_s = self._progress_at + patience_s - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
            finally:  # also at Ctrl-C
                self._is_over = True
                while self._kept:
                    self._drop_oldest()
                self._changed.notify_all()
        return 0 if self._error else self._num_dropped

    def _keep(self, data: bytes) -> None:
        if self._is_idle():
            self._progress_at = time.monotonic()
        self._kept.append(data)
        self._num_kept += len(data)
        while self._num_kept > self._max_bytes and len(self._kept) > 1:
            self._drop_oldest()
        if self._thread is None:
            # A daemon: it may wait for a reader for ever.
            self._thread = threading.Thread(target=self._pump, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _drop_oldest(self) -> None:
        data = self._kept.popleft()
        self._num_kept -= len(data)
        self._num_dropped += data.count(b"\n")

    def _is_idle(self) -> bool:
        return not self._kept and not self._is_writing

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _pump(self) -> None:
        while data := self._next():
            try:
                self._write_out(data)
            except OSError as error:
                with self._changed:
                    if error.errno != errno.EIO:  # else the terminal was closed: SIGHUP says so
                        self._error = error
                    self._kept.clear()
                    self._num_kept = 0
            with self._changed:
                self._is_writing = False
                self._is_late = self._is_late and bool(self._kept)
                self._changed.notify_all()

    def _next(self) -> bytes:
        """The oldest output, once there is some; nothing once all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._is_over)
            if not self._kept:
                return b""
            self._is_writing = True
            dropped, self._num_dropped = self._num_dropped, 0
            data = self._kept.popleft()
            self._num_kept -= len(data)
        return dropped_message(dropped, self._name).encode() + data if dropped else data

    def _write_out(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self._is_over:
            rest = rest[os.write(self._fd, rest[:_WRITE_BYTES]) :]
            with self._changed:
                self._progress_at = time.monotonic()


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def dropped_message(num_lines: int, name: str) -> str:
    """The line that says that output was dropped."""
    lines = "1 line of output was" if num_lines == 1 else f"{num_lines:,} lines of output were"
    return f"... {lines} dropped: the reader of {name} does not read\n"


@contextlib.contextmanager
def pumped_output(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Let `sys.stdout` and `sys.stderr` not wait for their readers within the context.

    Only where these are pipes, sockets or terminals, and are not pumped already.

    Args:
        patience_s: seconds to wait at the end for a reader that takes nothing at all.
    """
    before = sys.stdout, sys.stderr
    pumps = [
        _pump_of(stream, name)
        for stream, name in zip(before, ("standard output", "standard error"), strict=True)
    ]
    streams = [
        stream if pump is None else _text(pump, stream)
        for stream, pump in zip(before, pumps, strict=True)
    ]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        try:
            _finish(pumps, streams, patience_s)
        finally:
            # Only if they are still ours: other code may have replaced them.
            if sys.stdout is streams[0]:
                sys.stdout = before[0]
            if sys.stderr is streams[1]:
                sys.stderr = before[1]


def _finish(pumps: list[OutputPump | None], streams: list[TextIO], patience_s: float) -> None:
    """Write the rest; report on standard error what standard output did not accept."""
    out, err = pumps
    for stream, pump in zip(streams, pumps, strict=True):
        if pump is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    dropped = out.finish(patience_s) if out else 0
    if dropped:
        with contextlib.suppress(OSError, ValueError):
            streams[1].write(dropped_message(dropped, "standard output"))
            streams[1].flush()
    if err:
        # One reader of both has been waited for already.
        err.finish(_PROMPT_S if dropped else patience_s)


def _pump_of(stream: TextIO | None, name: str) -> OutputPump | None:
    """A pump for a stream that may have to wait."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream.buffer, OutputPump):
        return None
    try:
        stream.flush()
        mode = os.fstat(stream.fileno()).st_mode
        can_wait = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(stream.fileno())
    except (OSError, ValueError):  # it is closed, or no file
        return None
    return OutputPump(stream.fileno(), name) if can_wait else None


def _text(pump: OutputPump, stream: TextIO) -> TextIO:
    """A text stream over a pump that encodes as another stream does."""
    return io.TextIOWrapper(
        pump,  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
