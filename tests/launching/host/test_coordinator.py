"""Who may take part in a run of several hosts, and what lines do with what comes on them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.conftest import environment

from lockstep.errors import LaunchError
from lockstep.launching.host.agent import Rendezvous, rank_argv
from lockstep.launching.host.coordinator import Coordinator
from lockstep.launching.host.election import Election, Unreachable
from lockstep.launching.host.group import Record
from lockstep.launching.host.line import Line, Terms
from lockstep.launching.host.processes import StoreProcess

TERMS = Terms("1.0", "", hosts=2, ranks=1, replace=0, host_timeout_s=1.0, command=("train", "x"))


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        yield line


def said(line: socket.socket, **message: Any) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def heard(file: Any, word: str) -> dict[str, Any]:
    """The next message with this word; nothing at the end."""
    for text in file:
        message: dict[str, Any] = json.loads(text)
        if word in message:
            return message
    return {}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a coordinator, without a store."""
    monkeypatch.setattr(StoreProcess, "start", lambda self: None)
    listener = socket.create_server(("127.0.0.1", 0))
    number: int = listener.getsockname()[1]
    Coordinator(listener, TERMS, "own").thread.start()
    return number


class Etcd:
    """The keys of a run, some with a lease; the next `fails` questions get no answer."""

    def __init__(self) -> None:
        self.fails = 0
        self._values: dict[str, tuple[str, str]] = {}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "kv/range":
            if self.fails:
                self.fails -= 1
                raise Unreachable("no majority")
            value, _ = self._values.get(body["key"], ("", ""))
            return {"kvs": [{"value": value, "create_revision": "1"}] if value else []}
        for action in body.get("success", ()):
            if put := action.get("requestPut"):
                self._values[put["key"]] = put["value"], put["lease"]
            else:
                self._values.pop(action["requestDeleteRange"]["key"], None)
        return {"ID": "1", "succeeded": True, "result": {"TTL": "2"}}

    def expire(self) -> None:
        """Let so much time pass that no lease is left."""
        self._values = {key: put for key, put in self._values.items() if put[1] == "0"}


class Elected:
    """Starts coordinators that are elected one after the other, for a host with one rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
        self.etcd = Etcd()
        self._is_late = is_late
        monkeypatch.setattr(StoreProcess, "start", lambda self: None)
        monkeypatch.setattr(Election, "_post", lambda _, path, body: self.etcd.post(path, body))

    def resumes(self, then: str, fails: int = 0) -> bool | None:
        """Whether the rank is told to resume; None if the coordinator gives up before.

        Args:
            then: how far the run comes before the coordinator is lost: `starts`, `trains`, `ends`.
            fails: how many questions of the coordinator get no answer.
        """
        election = Election([("127.0.0.1", 1)], "run", lease_s=1.0)
        assert election.campaign({"id": "own"})
        self.etcd.fails = fails
        listener = socket.create_server(("127.0.0.1", 0))
        leader = Coordinator(listener, replace(TERMS, hosts=1), "own", election)
        leader._since -= TERMS.host_timeout_s if self._is_late else 0.0
        with connected(listener.getsockname()[1]) as own:
            of_own = hello(own, "own", hosts=1)
            leader.thread.start()
            told = heard(of_own, "start")
            if told and then != "starts":
                meet = {"say": "meet", "generation": 0, "takes_in": True, "code": 1}
                said(own, slot=0, say=meet)
                assert heard(of_own, "order")["order"]["generation"] == 1
            if told and then == "ends":
                said(own, slot=0, say={"say": "leave", "generation": 1})
                said(own, slot=0, code=0)
                assert heard(of_own, "end") == {"end": 0}
            leader._is_elected = False
            leader.thread.join(10)
            assert not leader.thread.is_alive()
        self.etcd.expire()
        return told.get("resumes")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_run_resumes_by_itself_only_if_one_of_its_name_has_lost_all_ranks(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    elected = Elected(monkeypatch, is_late)
    assert elected.resumes("ends") is False
    assert elected.resumes("ends") is False
    # Whoever gets no answer waits a while for ranks of a former coordinator, and asks again.
    assert elected.resumes("ends", fails=1) is (None if is_late else False)
    assert elected.resumes("trains") is False
    assert elected.resumes("starts") is True
    assert elected.resumes("ends") is True
    assert elected.resumes("ends") is False


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_new_coordinator_replaces_no_rank_that_the_last_one_has_replaced(
    monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    monkeypatch.setattr(StoreProcess, "start", lambda self: None)
    monkeypatch.setattr(Election, "_post", lambda _, path, body: etcd.post(path, body))
    etcd = Etcd()
    election = Election([("127.0.0.1", 1)], "run", lease_s=1.0)
    assert election.campaign({"id": "own"})
    assert election.allocate(1, 2)
    listener = socket.create_server(("127.0.0.1", 0))
    changed = {"hosts": 1, "ranks": 2, "replace": 3}
    leader = Coordinator(listener, replace(TERMS, **changed), "own", election)
    ranks = [Record(0, 0, generation=1), Record(1, 1, generation=1, exit_code=137)]
    ranks += [Record(2, 1)] * is_replaced
    with connected(listener.getsockname()[1]) as own:
        of_own = hello(own, "own", [*map(asdict, ranks)], **changed)
        leader.thread.start()
        assert heard(of_own, "order")["order"] == {"lost": 1}
        said(own, beat=1)
        told = [json.loads(next(of_own))]
        while "beat" not in told[-1]:
            told.append(json.loads(next(of_own)))
        starts = [(m["slot"], m["start"]) for m in told if "start" in m]
        assert starts == ([] if is_replaced else [(2, 1)])
        leader._is_elected = False
        leader.thread.join(10)


def test_an_agent_without_the_token_is_refused_and_learns_nothing_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StoreProcess, "start", lambda self: None)
    listener = socket.create_server(("127.0.0.1", 0))
    leader = Coordinator(listener, TERMS, "own", token="sesame")
    leader.thread.start()
    for wrong in ({}, *({"token": text} for text in ("", "sésame", "\udcff", "sesame "))):
        with connected(listener.getsockname()[1]) as other:
            said(other, terms={}, id="own", host="h", ranks=[], **wrong)
            told = json.loads(other.makefile().readline())
            what = "LOCKSTEP_AGENTS_TOKEN differs between here and there"
            assert told == {"refused": f"{what}; set the same one for all agents"}
    with connected(listener.getsockname()[1]) as other:
        said(other, terms={}, id="own", host="h", ranks=[], token=["sesame"])
        assert other.recv(100) == b""
    with connected(listener.getsockname()[1]) as other:
        said(other, terms=vars(TERMS), id="other", host="h", ranks=[], token="sesame")
        assert heard(other.makefile(), "welcome")
    leader._is_elected = False
    leader.thread.join(10)


def hello(line: socket.socket, name: str, records: Sequence[Any] = (), **others: Any) -> Any:
    said(line, terms={**vars(TERMS), **others}, id=name, host=name, ranks=records)
    return line.makefile()


def test_hosts_get_slots_other_programs_do_not_and_a_silent_host_is_lost(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(port) as browser, connected(port) as other, connected(port) as own:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert browser.recv(100) == b""
        for name, value in {"ranks": 2, "version": "0.9", "id": "7", "command": ["x"]}.items():
            with connected(port) as foreign:
                told = heard(hello(foreign, "foreign", **{name: value}), "refused")["refused"]
                assert told.startswith(f"{name} is ")
                assert told.count(" is ") == 1
        of_other, of_own = hello(other, "other"), hello(own, "own")
        # Those of the coordinator's host come first, whoever has come first.
        assert heard(of_own, "start")["slot"] == 0
        assert heard(of_other, "start")["slot"] == 1
        with connected(port) as third:
            of_third = hello(third, "third")
            assert heard(of_third, "welcome")
            for line, slot in ((own, 0), (other, 1)):
                meet = {"say": "meet", "generation": 0, "takes_in": True, "code": 1}
                said(line, slot=slot, say=meet)
            formed = heard(of_other, "order")["order"]
            assert (formed["generation"], formed["members"]) == (1, [0, 1])
            # Only the other one is silent.
            for number in range(12):
                said(own, beat=number)
                said(third, beat=number)
                time.sleep(0.12)
            assert other.recv(100) == b""
            started = heard(of_third, "start")
            assert (started["slot"], started["start"], started["joins"]) == (2, 0, True)
            assert heard(of_own, "order")["order"]["generation"] == 1
            assert heard(of_own, "order")["order"] == {"lost": 1}
            said(own, slot=0, say={"say": "leave", "generation": 1})
            assert heard(of_third, "order") == {"slot": 2, "order": None}
            said(third, slot=2, code=137)
            said(own, slot=0, code=0)
            assert heard(of_third, "end") == {"end": 0}
    text = capfd.readouterr().err
    assert "other has not answered for 1 s: rank 1 lost" in text
    assert "third joins with rank 2" in text


def test_a_host_that_is_lost_after_its_ranks_have_left_does_not_spoil_a_run(port: int) -> None:
    with connected(port) as own:
        of_own = hello(own, "own")
        with connected(port) as other:
            of_other = hello(other, "other")
            assert heard(of_own, "start")["slot"] == 0
            assert heard(of_other, "start")["slot"] == 1
            for line, slot in ((own, 0), (other, 1)):
                said(line, slot=slot, say={"say": "meet", "generation": 0, "takes_in": True})
            assert heard(of_other, "order")["order"]["generation"] == 1
            said(other, slot=1, say={"say": "leave", "generation": 1})
            assert heard(of_other, "order")["order"] == {"left": True}
        said(own, slot=0, say={"say": "leave", "generation": 1})
        said(own, slot=0, code=0)
        assert heard(of_own, "end") == {"end": 0}


def test_what_is_no_agent_is_told_apart_and_so_is_a_wrong_address() -> None:
    with pytest.raises(LaunchError, match="must be HOST:PORT"):
        Rendezvous.parse("h0")
    with pytest.raises(LaunchError, match="must be HOST:PORT"):
        Rendezvous.parse("h0:99999999")
    with pytest.raises(LaunchError, match="does not know the host no-such-host"):
        Rendezvous.parse("no-such-host.invalid:29500")
    with pytest.raises(LaunchError, match="a name of the run is missing at the end"):
        Rendezvous.parse("etcd://127.0.0.1:2379")
    assert Rendezvous.parse("127.0.0.1:29500").host == "127.0.0.1"
    elected = Rendezvous.parse("etcd://127.0.0.1:2379,127.0.0.2:2379/run")
    assert elected.servers == (("127.0.0.1", 2379), ("127.0.0.2", 2379))
    assert elected.name == "run"
    with pytest.raises(LaunchError, match="there is no such file"):
        rank_argv(["missing.py"])
    with pytest.raises(LaunchError, match="or one of train"):
        rank_argv(["hostname"])
    with pytest.raises(LaunchError, match="add --run-dir"):
        rank_argv(["train", "digits"])
    with pytest.raises(LaunchError, match="come before `--`"):
        rank_argv(["train", "digits", "-n", "2"])


def test_a_line_takes_messages_apart_and_ends_at_what_is_none() -> None:
    left, right = _tcp_pair()
    own = Line(left)
    own.send(beat=1)
    own.send(text="é" * 100_000)
    with right:
        data = b""
        while data.count(b"\n") < 2:
            own.flush()
            data += right.recv(1 << 16)
        assert [json.loads(text) for text in data.splitlines()] == [
            {"beat": 1},
            {"text": "é" * 100_000},
        ]
        right.sendall(b'{"a": 1}\n{"b"')
        assert _read(own) == ([{"a": 1}], False)
        right.sendall(b": 2}\nhello\n")
        assert _read(own) == ([{"b": 2}], True)
    own.close()


def test_a_line_with_more_than_is_read_at_once_is_not_at_its_end() -> None:
    left, right = _tcp_pair()
    sender, reader = Line(left), Line(right)
    for number in range(48):
        sender.send(number=number, printed="x" * (1 << 16))
    found: list[int] = []
    for _ in range(200):
        sender.flush()
        messages, is_over = reader.read()
        assert not is_over
        found += [message["number"] for message in messages]
    assert found == list(range(48))
    right.close()
    left.close()


def _read(line: Line) -> tuple[list[dict[str, Any]], bool]:
    time.sleep(0.1)
    return line.read()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


def test_an_agent_names_what_it_has_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        place = f"127.0.0.1:{foreign.getsockname()[1]}"
        options = ["--rendezvous", place, "--hosts", "2", "--", "resume", "run"]
        argv = [sys.executable, "-m", "lockstep", "agent", *options]
        with (
            subprocess.Popen(argv, env=environment(cold=True), stderr=subprocess.PIPE) as agent,
            foreign.accept()[0] as line,
        ):
            line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            assert agent.stderr is not None
            told = agent.stderr.read().decode()
    assert agent.returncode == 2
    assert "what listens there is no agent of Lockstep" in told
    argv[5] = "192.0.2.1:1"  # another host's, where nobody answers
    done = subprocess.run([*argv[:8], "--wait", "0", *argv[8:]], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"nobody has answered there within 0 s" in done.stderr
