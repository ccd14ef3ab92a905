"""Programs that watch a run while it is measured: a screen, an exporter, a page."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROWS, _COLUMNS = 50, 160
_BLOCK = 1 << 16


@contextmanager
def screen(run_dir: Path, cores: frozenset[int]) -> Iterator[None]:
    """`lockstep monitor` on a terminal of its own, whose output goes nowhere."""
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    process = _started(run_dir, [], cores, follower)
    os.close(follower)
    reader = threading.Thread(target=_drain, args=(leader,), daemon=True)
    reader.start()
    try:
        yield
    finally:
        _end(process)
        reader.join(10)
        os.close(leader)


@contextmanager
def exporter(run_dir: Path, cores: frozenset[int]) -> Iterator[None]:
    """`lockstep monitor --prometheus`, asked each second, as Prometheus is at its quickest."""
    process = _started(run_dir, ["--prometheus", "0"], cores, subprocess.PIPE)
    with _asked(process, _read):
        yield


@contextmanager
def web_page(run_dir: Path, cores: frozenset[int]) -> Iterator[None]:
    """`lockstep monitor --web`, whose page is asked for each second."""
    process = _started(run_dir, ["--web", "--port", "0"], cores, subprocess.PIPE)
    with _asked(process, _read):
        yield


@contextmanager
def _asked(process: subprocess.Popen[bytes], ask: Callable[[str], None]) -> Iterator[None]:
    """Ask a server again and again, at the address in the first line that it prints."""
    assert process.stdout is not None
    words = process.stdout.readline().decode().split()
    addresses = [word for word in words if word.startswith("http")]
    if not addresses:
        sys.exit(f"it did not say where it listens: {' '.join(words)}")
    ended = threading.Event()

    def ask_again() -> None:
        while not ended.wait(1.0):
            with contextlib.suppress(OSError):
                ask(addresses[0])

    threads = [
        threading.Thread(target=ask_again, daemon=True),
        threading.Thread(target=_drain, args=(process.stdout.fileno(),), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        _end(process)
        for thread in threads:
            thread.join(10)
        process.stdout.close()


def _started(
    run_dir: Path, options: list[str], cores: frozenset[int], output: int
) -> subprocess.Popen[bytes]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "OMPI_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "monitor", str(run_dir), *options],
        env=environ | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"},
        stdin=output if output >= 0 else subprocess.DEVNULL,
        stdout=output,
        stderr=output if output >= 0 else subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def _drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, _BLOCK):
            pass


def _read(address: str) -> None:
    with urllib.request.urlopen(address, timeout=5) as answer:
        answer.read(_BLOCK)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        sys.exit(f"what watches has ended by itself, with {process.returncode}")
    process.send_signal(signal.SIGTERM)
    process.wait(20)
