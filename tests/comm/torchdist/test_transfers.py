"""Transfers of gloo and their connections: what is sent, and waits that end or are given up."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.torchdist.process_group_transport import _in_a_row
from lockstep.comm.torchdist.waiting import Connections, LeftBehind, finish_message

HOST = "127.0.0.1"
Pair = tuple[socket.socket, socket.socket]


def connected() -> Pair:
    with socket.create_server((HOST, 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


@pytest.fixture
def watched() -> tuple[Connections, Pair]:
    connections = Connections(HOST)
    connections.begin()
    pair = connected()
    connections.end()
    return connections, pair


def test_a_connection_that_closes_is_noticed(watched: tuple[Connections, Pair]) -> None:
    connections, (here, there) = watched
    assert not connections.have_closed()
    there.close()
    assert connections.have_closed()
    here.close()
    assert not Connections(HOST).have_closed()


@pytest.mark.parametrize("reused_by", ["socket", "file"])
def test_a_descriptor_of_something_else_is_not_the_connection(
    watched: tuple[Connections, Pair], reused_by: str
) -> None:
    connections, (here, there) = watched
    other, further = connected()
    number = there.detach()
    replacement = os.open(os.devnull, os.O_RDONLY) if reused_by == "file" else other.fileno()
    os.dup2(replacement, number)
    assert connections.have_closed()
    connections.shut_down()
    further.sendall(b"all is well")
    assert other.recv(11) == b"all is well"
    assert here.recv(1) == b""
    os.close(number)
    if reused_by == "file":
        os.close(replacement)
    for end in (here, other, further):
        end.close()


def test_both_ends_see_a_shutdown(watched: tuple[Connections, Pair]) -> None:
    connections, pair = watched
    connections.shut_down()
    assert not connections.have_closed()  # the descriptors are still there
    for end in pair:
        assert end.recv(1) == b""
        end.close()


class Work:
    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.goes_on = threading.Event()

    def wait(self) -> None:
        self.goes_on.wait(self.seconds)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_it_ends_with_the_message(seconds: float) -> None:
    started = time.monotonic()
    finish_message(Work(seconds), lambda: False)
    assert time.monotonic() - started >= seconds


@pytest.mark.parametrize("error", [RuntimeError("closed"), ValueError("odd"), TimeoutError("late")])
def test_any_error_ends_it(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        finish_message(Work(0.3, error), lambda: False)


def test_a_wait_in_vain_is_given_up() -> None:
    work = Work(60)
    with pytest.raises(LeftBehind) as caught:
        finish_message(work, lambda: True)
    assert caught.value.is_stuck()
    work.goes_on.set()
    while caught.value.is_stuck():
        time.sleep(0.01)


SCRIPT = Path(__file__).parents[1] / "launched" / "lost_transfer.py"


@pytest.mark.slow
def test_a_transfer_that_gloo_forgets_is_given_up(
    run_to_end: Callable[..., CompletedProcess[str]],
) -> None:
    done = run_to_end([sys.executable, str(SCRIPT)], 60)
    assert done.returncode == 0, done.stdout
    forgotten, *ends = done.stdout.splitlines()
    # A day when gloo forgets none, the transport has less to do.
    assert forgotten == "forgotten by gloo: 2"
    assert ends == ["given up"] * 2


PARTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5)


@given(PARTS)
def test_any_parts_come_one_behind_the_other(parts: list[tuple[int, int]]) -> None:
    memory = torch.arange(10)
    counts, starts = [count for count, _ in parts], [start for _, start in parts]
    wanted = [n for count, start in parts for n in range(start, start + count)]
    assert _in_a_row(memory, counts, starts).tolist() == wanted


def test_what_lies_in_a_row_is_not_copied() -> None:
    memory = torch.arange(10)
    sent = _in_a_row(memory, [0, 3, 0, 2], [9, 4, 0, 7])
    assert sent.tolist() == [4, 5, 6, 7, 8]
    assert sent.data_ptr() == memory[4:].data_ptr()
