"""Connections of a library are known by what they are, not by their descriptors alone."""

from __future__ import annotations

import os
import socket

import pytest

from lockstep.comm.torchdist.waiting import Connections

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
