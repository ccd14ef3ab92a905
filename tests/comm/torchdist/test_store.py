"""Ranks meet at rank 0's store, whoever comes first; another's on the same port is no store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from torch._C._distributed_c10d import TCPStore

from lockstep.comm.torchdist import store
from lockstep.errors import EnvironError

LONG = timedelta(seconds=30)
ADDRESSES = ["127.0.0.1", "0.0.0.0"]
"""A loopback one, and one that counts as another host's."""


@pytest.fixture(autouse=True)
def short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ANSWER", timedelta(seconds=0.5))
    monkeypatch.setattr(store, "_hosted", {})


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def meet(host: str, port: int, rank: int, size: int = 2, timeout: timedelta = LONG) -> TCPStore:
    met: TCPStore = store.meet_at(host, port, rank, size, timeout)
    return met


@pytest.mark.parametrize("host", ADDRESSES)
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_meet_whoever_comes_first(host: str, port: int, first: int) -> None:
    """Also one that comes later than another rank may wait for an answer."""
    with ThreadPoolExecutor() as pool:
        early = pool.submit(meet, host, port, first)
        time.sleep(0.8)
        late = meet(host, port, 1 - first)
        early.result().set("said", "by the first")
        assert late.get("said") == b"by the first"


@pytest.mark.parametrize("host", ADDRESSES)
def test_further_trainings_of_a_script_have_the_same_store(host: str, port: int) -> None:
    first, second = meet(host, port, 0), meet(host, port, 0)
    first.set("said", "once")
    assert second.get("said") == b"once"


@pytest.mark.parametrize("host", ADDRESSES)
def test_rank_0_says_that_a_port_is_taken(host: str, port: int) -> None:
    with (
        socket.create_server(("", port)),
        pytest.raises(EnvironError, match=f"MASTER_PORT={port}: something else listens"),
    ):
        meet(host, port, 0)


@pytest.fixture(params=["store", "silence", "web page"])
def other_program(request: pytest.FixtureRequest, port: int) -> Iterator[None]:
    """Something else that listens on the port."""
    if request.param == "store":
        theirs = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        yield
        del theirs
    elif request.param == "silence":
        with socket.create_server(("", port)):
            yield
    else:
        with ThreadingHTTPServer(("", port), BaseHTTPRequestHandler) as server:
            serving = threading.Thread(target=server.serve_forever, daemon=True)
            serving.start()
            yield
            server.shutdown()


@pytest.mark.parametrize("host", ADDRESSES)
def test_other_ranks_know_another_program_on_the_port(
    host: str, port: int, other_program: None
) -> None:
    began = time.monotonic()
    with pytest.raises(EnvironError, match=f"MASTER_PORT={port}: what listens on .* is not rank 0"):
        meet(host, port, 1)
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("host", ADDRESSES)
def test_ranks_of_another_job_are_told_apart(host: str, port: int) -> None:
    held = meet(host, port, 0, size=3)
    with pytest.raises(EnvironError, match=r"WORLD_SIZE=2: rank 0 .* one of 3 ranks"):
        meet(host, port, 1)
    del held


def test_a_rank_that_was_started_twice_is_told(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = meet("127.0.0.1", port, 0), meet("127.0.0.1", port, 1)
    again = meet("127.0.0.1", port, 1)  # of the same process: a script's next training
    monkeypatch.setattr(store.os, "getpid", lambda: 1)
    with pytest.raises(EnvironError, match=r"^RANK=1: process \d+ of \S+ has this rank, too"):
        meet("127.0.0.1", port, 1)
    del held, again


@pytest.mark.parametrize("host", ADDRESSES)
def test_rank_0_that_never_comes_is_missed(host: str, port: int) -> None:
    with pytest.raises(EnvironError, match=f"MASTER_PORT={port}: rank 0 has not come .* refused"):
        meet(host, port, 1, timeout=timedelta(seconds=0.2))
