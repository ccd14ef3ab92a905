"""A lock that tells of its holder's death before the kernel has freed the holder's memory."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from lockstep.comm.torchdist.supervision import LifeLock, watch

HELD_MB = 200


def holder(line: socket.socket, is_released: bool) -> None:
    """A process with much memory that holds a lock."""
    lock = LifeLock()
    memory = bytearray(os.urandom(1 << 20) * HELD_MB)
    socket.send_fds(line, [b"held"], [lock.fd])
    line.recv(1)
    if is_released:
        lock.release()
    line.send(b"done")
    time.sleep(60)
    os._exit(len(memory) > 0)


@pytest.mark.parametrize("is_released", [False, True])
def test_a_death_is_told_before_the_parent_hears_of_it_unless_the_lock_was_released(
    is_released: bool,
) -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        holder(theirs, is_released)
    with ours, theirs:
        _, [fd], _, _ = socket.recv_fds(ours, 10, 1)
        died = threading.Event()
        at: list[float] = []

        def note() -> None:
            at.append(time.perf_counter())
            died.set()

        watch(fd, note)
        ours.send(b"g")
        assert ours.recv(4) == b"done"
        assert not died.wait(0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        heard_at = time.perf_counter()
        assert died.wait(0.05 if is_released else 5) is not is_released
        assert is_released or at[0] < heard_at
