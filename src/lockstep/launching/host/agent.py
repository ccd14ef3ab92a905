"""The agent of a host: it starts ranks, and takes part in a run of several hosts.

All agents are started with the same arguments. The one whose host owns the rendezvous address is
also the home of the coordinator. Orders for ranks come over a line to it, and what they say goes
back. An agent holds a lease: it expires when the coordinator has not answered for some time, and
before the coordinator takes the host to be lost. Then the agent kills its ranks, and comes again.
"""

from __future__ import annotations

import math
import re
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.comm.host import is_loopback
from lockstep.comm.torchdist.supervision import FromRank, ToRank
from lockstep.errors import EnvironError, LaunchError, RankFailure
from lockstep.launching.host.coordinator import Coordinator, named, say
from lockstep.launching.host.election import Election, Unreachable
from lockstep.launching.host.group import KILLED, Order, Record
from lockstep.launching.host.line import Line, Output, Rendezvous, Terms
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.supervisor import (
    ADDRESS,
    PLACE,
    PORT,
    RANKS,
    RESUMES,
    SIZE,
    STORE,
    TIMEOUT,
    Processes,
)

_COMMANDS = ("train", "resume")
"""Subcommands that ranks can run."""

_LEASE = 0.75
"""Share of the time after which a host is lost for which its agent trusts an answer."""
_LEASE_WITH_ETCD = 4.0
"""The same share for its ranks where another coordinator may be elected."""
_MOST_CONNECT_S = 3.0
_ANSWER_S = 8.0
_RETRY_S = 0.2
_LOOK_S = 0.01


def rank_argv(command: Sequence[str]) -> list[str]:
    """The program and arguments of each rank, which ends with its agent.

    Raises:
        LaunchError: no rank can run this command.
    """
    first, *rest = command
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise LaunchError(f"{first}: there is no such file on {socket.gethostname()}")
        return bound_to_parent([sys.executable, first, *rest])
    if first not in _COMMANDS:
        raise LaunchError(f"{first}: must be script.py, or one of {', '.join(_COMMANDS)}")
    if any(re.fullmatch(r"-n.*|--ranks.*|--launcher.*|--replace.*", word) for word in rest):
        raise LaunchError(
            f"{' '.join(command)}: each rank runs this; -n and --replace come before `--`"
        )
    if first == "train" and not any(word.startswith("--run-dir") for word in rest):
        raise LaunchError("train: add --run-dir, by which ranks that join later find the run")
    return bound_to_parent([sys.executable, "-m", "lockstep", *command])


class _Lost(Exception):
    """The line to the coordinator is broken, or the lease has expired."""


class Agent:
    """Starts the ranks of this host, and serves them to the end of the run.

    To be made in the main thread, which runs it.

    Args:
        rendezvous: where the agents meet.
        terms: what they have to agree on.
        argv: program and arguments of each rank.
        patience_s: seconds to wait for the coordinator, at the start and after a loss.
        is_led: whether the coordinator is in another program, which gets what the ranks print.
        fds: file descriptors of this process that all ranks inherit.
        token: secret that all agents of the run share; empty for none.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        terms: Terms,
        argv: Sequence[str],
        patience_s: float,
        is_led: bool = False,
        fds: Sequence[int] = (),
        token: str = "",
    ) -> None:
        self._token = token
        self._rendezvous, self._terms, self._patience_s = rendezvous, terms, patience_s
        self._output = Output() if is_led else None
        streams = None if self._output is None else self._output.writers
        self._processes = Processes(argv, fds, has_terminal=True, streams=streams)
        self._records: dict[int, Record] = {}
        self._id = uuid.uuid4().hex
        self._election: Election | None = None
        self._coordinator: Coordinator | None = None
        self._home: tuple[str, int] | None = None
        self._answer_s = _LEASE * terms.host_timeout_s
        share = _LEASE_WITH_ETCD if rendezvous.servers else _LEASE
        self._lease_s = share * terms.host_timeout_s
        # A host that is lost does not answer, and others wait for this one meanwhile.
        self._connect_s = min(_MOST_CONNECT_S, terms.host_timeout_s / 4)
        self._has_been_in = False
        self._answered_at = self._beat_at = 0.0
        if rendezvous.servers:
            self._election = self._new_election()
        elif not is_led:
            if terms.hosts > 1 and is_loopback(rendezvous.host) and not rendezvous.is_loopback:
                raise LaunchError(
                    f"--rendezvous {rendezvous.text}: {socket.gethostname()} knows this name as "
                    f"{rendezvous.host}, which no other host reaches; give its IPv4 address"
                )
            self._coordinate(rendezvous.host, rendezvous.port)

    def run(self) -> int:
        """Serve until the run has ended; its exit code.

        Raises:
            LockstepError: this agent cannot take part in the run.
        """
        while True:
            line = self._connected()
            if isinstance(line, int):
                return line
            try:
                code = self._serve(line, self._welcomed(line))
            except _Lost as loss:
                self._leave(line, str(loss))
                continue
            if self._coordinator is not None:
                self._coordinator.thread.join()
            return code

    def _new_election(self) -> Election:
        servers, name = self._rendezvous.servers, self._rendezvous.name
        return Election(servers, name, self._terms.host_timeout_s)

    def _coordinate(self, host: str, port: int) -> None:
        """Become the home of the coordinator, where this host owns the address and may be that."""
        try:
            listener = socket.create_server((host, port))
        except OSError:  # the address is another host's, or something listens there already
            return
        election: Election | None = None
        if self._election is not None:
            election = self._new_election()
            place = {"host": host, "port": listener.getsockname()[1], "id": uuid.uuid4().hex}
            try:
                is_elected = election.campaign(place)
            except Unreachable:
                is_elected = False
            if not is_elected:
                listener.close()
                return
        self._home = listener.getsockname()
        self._coordinator = Coordinator(listener, self._terms, self._id, election, self._token)
        self._coordinator.thread.start()

    def _connected(self) -> Line | int:
        """A line to the coordinator, or the exit code where none will come any more.

        Raises:
            EnvironError: it does not come.
        """
        began = time.monotonic()
        refused_at: float | None = None
        while self._processes.unheard is None:
            if time.monotonic() > self._answered_at + self._lease_s and (slots := self._kill()):
                say(f"no coordinator for {self._lease_s:g} s: {named(slots)} ended")
            try:
                address = self._address()
                if isinstance(address, int):
                    return address
                return Line(socket.create_connection(address, timeout=self._connect_s))
            except ConnectionRefusedError:
                refused_at = refused_at or time.monotonic()
            except (OSError, Unreachable):
                refused_at = None
            now = time.monotonic()
            # At the start it may not listen yet.
            is_gone = refused_at is not None and now > refused_at + self._terms.host_timeout_s
            if self._has_been_in and is_gone and self._election is None:
                say("the coordinator has ended, and the run with it; start all agents again")
                return RankFailure.exit_code
            if now > began + self._patience_s:
                if self._has_been_in:
                    say(
                        f"--rendezvous {self._rendezvous.text}: no coordinator has answered for "
                        f"{self._patience_s:g} s; start all agents again with --resume"
                    )
                    return RankFailure.exit_code
                raise EnvironError(
                    f"--rendezvous {self._rendezvous.text}: nobody has answered there within "
                    f"{self._patience_s:g} s; start one agent on that host with the same "
                    "arguments, or etcd, and let TCP connections through"
                )
            self._listen(None, _RETRY_S)
        return KILLED + self._processes.unheard

    def _address(self) -> tuple[str, int] | int:
        """Where the coordinator is; the exit code of the run, if it has ended.

        Raises:
            ConnectionRefusedError: there is none.
            OSError: etcd cannot be reached, like `Unreachable`.
        """
        if self._election is None:
            return self._rendezvous.host, self._rendezvous.port
        holder = self._election.holder()
        if holder is None:
            code = self._election.ended()
            if self._has_been_in and code is not None:
                return code
            self._coordinate(self._own_address(), 0)
            holder = self._election.holder()
        if holder is None:
            raise ConnectionRefusedError
        return holder["host"], holder["port"]

    def _welcomed(self, line: Line) -> list[dict[str, Any]]:
        """Be let in by the coordinator: what it has said after that.

        Raises:
            LockstepError: it refuses this agent, or is no coordinator.
        """
        asked_at = time.monotonic()
        ranks = [asdict(record) for record in self._records.values()]
        hello = {"terms": asdict(self._terms), "id": self._id, "host": socket.gethostname()}
        line.send(**hello, token=self._token, ranks=ranks)
        deadline, is_over = asked_at + _ANSWER_S, False
        if len(self._processes):  # which are not to outlive the lease
            deadline = min(deadline, self._answered_at + self._lease_s)
        while time.monotonic() < deadline and not is_over:
            messages, is_over = line.read()
            first = messages[0] if messages else {}
            if "welcome" in first:
                self._has_been_in = True
                self._answered_at = asked_at
                return messages[1:]
            if "forget" in first:
                self._kill()
                raise _Lost("goes on without it")
            if "refused" in first:
                raise LaunchError(
                    f"--rendezvous {self._rendezvous.text}: the agent there has another run: "
                    f"{first['refused']}; start all agents with the same arguments, or choose "
                    "another port or name"
                )
            self._listen(line, _LOOK_S)
        if self._has_been_in or self._election is not None:
            raise _Lost("does not answer")
        raise EnvironError(
            f"--rendezvous {self._rendezvous.text}: what listens there is no agent of Lockstep "
            f"{self._terms.version}; choose another port"
        )

    def _serve(self, line: Line, messages: list[dict[str, Any]]) -> int:
        """Start ranks and pass on messages until the run has ended; its exit code.

        Raises:
            _Lost: this host is lost to the others, or may be.
        """
        self._processes.watch(line.connection)
        # Nothing can come between it and a coordinator of this process, which may be as late as
        # itself: where a whole host has stood still, its ranks stay, for they have the state.
        answer_s = math.inf if line.peer == self._home else self._answer_s
        is_over = False
        while True:
            for message in messages:
                if "end" in message:
                    return int(message["end"])
                self._take(line, message)
            now = time.monotonic()
            if is_over:
                raise _Lost("has closed the line")
            if now > self._answered_at + answer_s:
                raise _Lost("does not answer")
            if now >= self._beat_at:
                self._beat_at = now + self._terms.host_timeout_s / 8
                line.send(beat=now)
            if self._processes.unheard is not None:
                line.send(stop=self._processes.unheard)
                self._processes.unheard = None
            line.flush()
            self._listen(line, min(self._beat_at, self._answered_at + answer_s) - now)
            messages, is_over = line.read()

    def _listen(self, line: Line | None, patience_s: float) -> None:
        """Remember what ranks say and that they end, and pass it on, after what they print."""
        reports = self._processes.wait(patience_s)
        if self._output is not None:
            has_room = line is None or not line.is_full  # else ranks that print wait
            if has_room or reports:
                self._output.carry(line)
            for reader in self._output.readers:
                self._processes.forget(reader)
                if has_room:
                    self._processes.watch(reader)
        for slot, said in reports:
            record = self._records[slot]
            if isinstance(said, FromRank):
                record.note_said(said)
            else:
                record.exit_code = said
            if line is not None and isinstance(said, FromRank):
                line.send(slot=slot, say=asdict(said))
            elif line is not None:
                line.send(slot=slot, code=said)

    def _take(self, line: Line, message: dict[str, Any]) -> None:
        if "beat" in message:
            self._answered_at = message["beat"]
        elif "signal" in message:
            self._processes.forward(message["signal"])
        elif "start" in message:
            slot = message["slot"]
            self._records[slot] = Record(slot, message["start"])
            self._processes.start(slot, self._variables(line, message))
        else:
            order = message["order"]
            told = None if order is None else ToRank.from_json(order)
            if told is not None:
                self._records[message["slot"]].note_told(told)
            self._processes.carry_out(Order(message["slot"], told))

    def _variables(self, line: Line, message: dict[str, Any]) -> dict[str, object]:
        """Environment variables of a rank."""
        start: dict[str, object] = {PLACE: message["start"]} if message["joins"] else {}
        if message["resumes"]:
            start[RESUMES] = 1
        return start | {
            SIZE: self._terms.hosts * self._terms.ranks,
            RANKS: self._terms.ranks,
            STORE: message["store"][0],
            PORT: message["store"][1],
            # By which this host reaches the others, whichever interfaces it has.
            ADDRESS: line.connection.getsockname()[0],
            # With etcd a loss may be told only by the next coordinator.
            TIMEOUT: math.ceil(max(self._terms.host_timeout_s, self._lease_s)),
        }

    def _leave(self, line: Line, why: str) -> None:
        """Close the line; the ranks end, unless another coordinator may go on with them."""
        self._processes.forget(line.connection)
        line.close()
        begun = any(record.generation for record in self._records.values())
        slots = [] if begun and self._election is not None else self._kill()
        text = f"the coordinator at {self._rendezvous.text} {why}"
        say(f"{text}: {named(slots)} ended; trying to come back" if slots else text)

    def _kill(self) -> list[int]:
        """End the ranks, which the others go on without; their slots."""
        self._records.clear()
        if self._processes.forwarded is not None:  # they are ended before it could stop the run
            self._processes.unheard, self._processes.forwarded = self._processes.forwarded, None
        return self._processes.kill()

    def _own_address(self) -> str:
        """The address of this host by which it reaches a server of etcd.

        Raises:
            OSError: it reaches none.
        """
        problem, local = OSError("there is no server"), ""
        for server in self._rendezvous.servers:
            try:
                with socket.create_connection(server, timeout=self._connect_s) as connection:
                    own = str(connection.getsockname()[0])
            except OSError as error:
                problem = error
                continue
            if not is_loopback(own):
                return own
            local = own  # a server of this host: others do not reach it by this address
        if local:
            return local
        raise problem
