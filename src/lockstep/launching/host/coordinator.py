"""The coordinator of the agents of several hosts, and the lines between them.

It listens at the rendezvous address, assigns slots to the ranks of each host, leads their group
(`group.py`), and hosts the store in which they find each other. An agent that is silent for some
seconds is lost with its ranks; its own clock has told it so before, and it has killed them. Where
etcd elects it (`election.py`), another may take over: agents tell it what they remember of their
ranks. What some ranks know of their generation it tells the others, too, and then that it is lost.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from lockstep.comm.torchdist.supervision import FromRank
from lockstep.errors import RankFailure
from lockstep.launching.host.election import Election, Unreachable
from lockstep.launching.host.group import KILLED, Order, Record, vacant
from lockstep.launching.host.line import Line, Terms
from lockstep.launching.host.processes import StoreProcess
from lockstep.launching.host.supervisor import Leader

_HELLO_S = 8.0
"""Seconds that who connects may take to say what it is."""
_PART_S = 1.0
_MOST_LOST_STORES = 3
"""In a row, each killed soon after its start: something kills whatever is started."""
_LOST_WITH_HOST = 137
"""The exit code of a rank whose host is lost: that of a process that was killed."""


class _Agent:
    """What the coordinator knows of an agent.

    Attributes:
        line: the line to it.
        name: what its host is called; empty before it has said so.
        id: distinguishes it from all other agents.
        slots: numbers of its ranks that have not ended.
        heard_at: when something came from it, in seconds of the monotonic clock.
        is_in: whether its host has got slots.
        records: what it remembers of its ranks under an earlier coordinator.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.name = self.id = ""
        self.slots: set[int] = set()
        self.heard_at = time.monotonic()
        self.is_in = False
        self.records: dict[int, Record] = {}


class Coordinator(Leader):
    """Leads the ranks of several hosts to their end, in a thread of the agent of one of them.

    Args:
        listener: socket that listens at the rendezvous address.
        terms: what the agents have to agree on.
        own: the `id` of the agent of this process, whose ranks get the first slots; empty for none.
        election: that this coordinator has won, and may lose; None where there are none.
        token: secret that agents have to know; empty for none.
    """

    def __init__(
        self,
        listener: socket.socket,
        terms: Terms,
        own: str,
        election: Election | None = None,
        token: str = "",
    ) -> None:
        super().__init__(terms.hosts * terms.ranks, terms.replace)
        self._terms, self._own = terms, own
        self._election, self._token = election, token
        self._is_elected = True
        self._generation = 0
        self._since = self._kept_at = self._heard_at = time.monotonic()
        self._listener = listener
        listener.setblocking(False)
        # Bound before the first rank is told where it is.
        self._store, self._store_since = StoreProcess(listener.getsockname()[0]), time.monotonic()
        self._num_lost_stores = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._agents: list[_Agent] = []
        self._places: list[int] = []
        self._has_begun = self._resumes = False
        self._ended: int | None = None
        self.thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)

    def carry_out(self, orders: Iterable[Order]) -> None:
        """See `Leader.carry_out`."""
        for order in orders:
            message = order.message
            if message is not None and message.generation is not None:
                if not self._allocate(message.generation):
                    return
                message = replace(message, store=self._store.address)
            if (agent := self._agent_of(order.slot)) is not None:
                agent.line.send(slot=order.slot, order=message and message.to_json())

    def replace(self, lost: int) -> bool:
        """See `Leader.replace`; the ranks of a host that is lost come back with its agent."""
        agent = self._agent_of(lost)
        if agent is not None:
            self._start(agent, [self._places[lost]])
        return agent is not None

    def _serve(self) -> None:
        try:
            self._run()
        except Unreachable:
            self._is_elected = False
            self._part()
        except BaseException:  # the agent would wait for this thread for ever
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        self._store.start()
        beat_s = self._terms.host_timeout_s / 8
        while self._ended is None and self._is_holder():
            waits = [beat_s, *filter(None, [self.patience_s])]
            for key, _ in self._selector.select(min(waits)):
                if key.data is None:
                    self._accept()
                elif key.data in self._agents:
                    self._listen(key.data)
            self._drop_silent()
            self._look_at_store()
            self._admit()
            self.look_at_clock()
            for agent in self._agents:
                agent.line.flush()
            if self._has_begun and self._group.is_ended:
                self._ended = self._group.exit_code
        self._part()

    def _is_holder(self) -> bool:
        """Whether this coordinator may still decide anything; asks for more time when it is due."""
        now = time.monotonic()
        if self._election is None or not self._is_elected:
            return self._is_elected
        if now > self._kept_at + self._election.lease_s / 8:
            self._kept_at = now
            with suppress(Unreachable):
                self._election.keep()
        self._is_elected = time.monotonic() < self._election.valid_until
        return self._is_elected

    def _allocate(self, generation: int) -> bool:
        """Number a generation; false if this coordinator is none any more."""
        if self._election is not None and generation > self._generation:
            try:
                num_slots = self._group.num_slots
                self._is_elected = self._is_holder() and self._election.allocate(
                    generation, num_slots
                )
            except Unreachable:
                self._is_elected = False
        self._generation = generation
        return self._is_elected

    def _look_at_store(self) -> None:
        """Have ranks meet in another store if it was killed; one that cannot start ends the run."""
        if (code := self._store.exit_code) is None:
            return
        has_lasted = time.monotonic() > self._store_since + self._terms.host_timeout_s
        self._num_lost_stores = 1 if has_lasted else self._num_lost_stores + 1
        if code >= 0 or self._num_lost_stores > _MOST_LOST_STORES:
            say(f"the store has ended (exit code {code}); start all agents again")
            self._ended = RankFailure.exit_code
            return
        say("the store was killed: the ranks meet in another one")
        self._store, self._store_since = StoreProcess(self._store.address[0]), time.monotonic()
        self._store.start()
        self.carry_out(self._group.renew())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process has too many files open
            return
        agent = _Agent(Line(connection))
        self._agents.append(agent)
        self._selector.register(connection, selectors.EVENT_READ, agent)

    def _listen(self, agent: _Agent) -> None:
        messages, is_over = agent.line.read()
        for message in messages:
            agent.heard_at = time.monotonic()
            try:
                self._take(agent, message)
            except (AttributeError, KeyError, TypeError, ValueError):  # no agent would say so
                is_over = True
            if agent not in self._agents:
                return
        if is_over:
            self._drop(agent, "has ended or has lost its connection")

    def _take(self, agent: _Agent, message: dict[str, Any]) -> None:
        if not agent.id:
            self._welcome(agent, message)
        elif "beat" in message:
            agent.line.send(beat=message["beat"])
        elif "stop" in message:
            self._stop(agent, int(message["stop"]))
        elif message["slot"] in agent.records and not self._has_begun:
            record = agent.records[message["slot"]]
            if "say" in message:
                record.note_said(FromRank(**message["say"]))
            else:
                record.exit_code = int(message["code"])
        elif message["slot"] in agent.slots and "say" in message:
            self.handle((message["slot"], FromRank(**message["say"])))
        elif message["slot"] in agent.slots:
            self.handle((message["slot"], int(message["code"])))
            agent.slots.discard(message["slot"])

    def _stop(self, agent: _Agent | None, signum: int) -> None:
        """Handle a signal that an agent without ranks has got, or the program with this object."""
        if not self._has_begun and not any(other.records for other in self._agents):
            self._ended = KILLED + signum
        elif agent is None or agent.is_in or agent.id == self._own:
            # The ranks of one tell all others; those of the agent that sends it may be dying.
            for other in sorted(self._agents, key=lambda a: (not a.slots, a is agent))[:1]:
                other.line.send(signal=signum)
        else:
            agent.line.send(end=KILLED + signum)

    def _welcome(self, agent: _Agent, hello: dict[str, Any]) -> None:
        """Let an agent in, or say why not."""
        if reason := self._terms.refusal(hello, self._token):
            agent.line.send(refused=reason)
            self._remove(agent)
            return
        agent.id, agent.name = str(hello["id"]), str(hello["host"])
        for former in [a for a in self._agents if a.id == agent.id and a is not agent]:
            self._drop(former, "has come again")
        records = [Record.from_json(values) for values in hello["ranks"]]
        if records and self._has_begun:  # it has come too late: the others go on without these
            agent.line.send(forget=True)
            self._remove(agent)
            return
        agent.records = {record.slot: record for record in records}
        agent.line.send(welcome=True)
        if self._num_hosts() >= self._terms.hosts:
            say(f"{agent.name} waits: it joins when one of the {self._terms.hosts} hosts is lost")
        elif self._terms.hosts > 1 and not (records or self._has_begun):
            say(f"{agent.name} is there; the run begins when {self._terms.hosts} hosts are")

    def _admit(self) -> None:
        """Give slots to the hosts that have come, where there are too few."""
        known = sorted((a for a in self._agents if a.id), key=lambda a: a.id != self._own)
        if not self._has_begun:
            is_late = time.monotonic() > self._since + self._terms.host_timeout_s / 2
            holding = sum(bool(agent.records) for agent in known)
            if holding:
                # Spares do not count: whoever comes later with ranks has to end them.
                if is_late or holding >= self._terms.hosts:
                    self._take_over(known)
            elif not is_late and self._may_be_taken_over:
                return
            elif len(known) >= self._terms.hosts and self._own in ("", known[0].id):
                if self._election is not None:
                    self._resumes = self._election.newest()[0] > 0
                    if not self._election.begin():
                        self._is_elected = False
                        return
                self._has_begun = True
                for agent in known[: self._terms.hosts]:
                    self._start(agent, range(self._terms.ranks), is_first=True)
            return
        for agent in [agent for agent in known if not agent.is_in]:
            if self._group.can_grow and self._num_hosts() < self._terms.hosts:
                self._start(agent, range(self._terms.ranks))
                say(f"{agent.name} joins with {named(agent.slots)}")

    @cached_property
    def _may_be_taken_over(self) -> bool:
        """Whether agents may come that have ranks of a run which is not over; asks etcd."""
        if self._election is None:
            return False
        with suppress(Unreachable):
            return self._election.newest()[0] > 0
        return True

    def _take_over(self, agents: Sequence[_Agent]) -> None:
        """Go on with the ranks that agents have under another coordinator."""
        assert self._election is not None
        self._has_begun = True
        records: list[Record] = []
        for agent in agents:
            records += agent.records.values()
            agent.is_in = bool(agent.records)
            agent.slots = {r.slot for r in agent.records.values() if r.exit_code is None}
        self._generation, num_slots = self._election.newest()
        orders = self._group.take_over(self._generation, num_slots, records)
        self._places = [0] * self._group.num_slots
        for record in records:
            self._places[record.slot] = record.place
        say(f"the coordinator is on {socket.gethostname()} now")
        self.carry_out(orders)
        # Those that came with a host count too: never more than were asked for.
        num_first = self._terms.hosts * self._terms.ranks
        self._replacements = max(0, self._terms.replace - (self._group.num_slots - num_first))
        # The last coordinator may have replaced some of those that have ended.
        for agent, record in [(a, r) for a in agents for r in vacant(a.records.values())]:
            if self._replacements and self._group.is_replaceable(record.slot):
                self._replacements -= 1
                self._start(agent, [record.place])

    def _num_hosts(self) -> int:
        return sum(agent.is_in for agent in self._agents)

    def _start(self, agent: _Agent, places: Iterable[int], is_first: bool = False) -> None:
        """Have an agent start ranks, in the place of the local ranks with these numbers.

        The first ones go on from a checkpoint if the run has lost all of its ranks: etcd was gone.
        """
        agent.is_in = True
        for place in places:
            slot = len(self._places) if is_first else self._group.add()
            self._places.append(place)
            agent.slots.add(slot)
            resumes = is_first and self._resumes
            agent.line.send(
                slot=slot, start=place, joins=not is_first, resumes=resumes,
                store=self._store.address,
            )  # fmt: skip

    def _drop_silent(self) -> None:
        now = time.monotonic()
        # While this process has stood still, it could hear nobody.
        deaf_s = max(0.0, now - self._heard_at - self._terms.host_timeout_s / 4)
        self._heard_at = now
        for agent in [a for a in self._agents if not self._own or a.id != self._own]:
            agent.heard_at = min(now, agent.heard_at + deaf_s)
            if not agent.id and now > agent.heard_at + _HELLO_S:
                self._remove(agent)
            elif agent.id and now > agent.heard_at + self._terms.host_timeout_s:
                self._drop(agent, f"has not answered for {self._terms.host_timeout_s:g} s")

    def _drop(self, agent: _Agent, why: str) -> None:
        """Take a host's ranks out of the group; its agent ends them, if it is still there."""
        self._remove(agent)
        if agent.slots and not self._group.is_ended:
            say(f"{agent.name} {why}: {named(agent.slots)} lost")
        for slot in sorted(agent.slots):
            self._group.excuse(slot)
            self.handle((slot, _LOST_WITH_HOST))

    def _remove(self, agent: _Agent) -> None:
        self._agents.remove(agent)
        self._selector.unregister(agent.line.connection)
        agent.line.close()

    def _agent_of(self, slot: int) -> _Agent | None:
        return next((agent for agent in self._agents if slot in agent.slots), None)

    def _part(self) -> None:
        """Tell all agents that the run has ended, and wait until they have heard it."""
        self._selector.unregister(self._listener)
        self._listener.close()
        if self._election is not None and self._is_elected and self._ended is not None:
            with suppress(Unreachable):
                self._election.end(self._ended)
        if self._ended is not None:  # else another has been elected, or will be
            for agent in self._agents:
                agent.line.send(end=self._ended)
        deadline = time.monotonic() + _PART_S
        while self._ended is not None and len(self._agents) > 1 and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                if key.data in self._agents and key.data.line.read()[1]:
                    self._remove(key.data)
            for agent in self._agents:
                agent.line.flush()
        for agent in tuple(self._agents):
            self._remove(agent)
        self._selector.close()
        self._store.end()


def named(slots: Iterable[int]) -> str:
    """Ranks in words."""
    numbers = ", ".join(map(str, sorted(slots)))
    return f"rank {numbers}" if "," not in numbers else f"ranks {numbers}"


def say(text: str) -> None:
    """Tell the user something that is no error, where there is still somebody to read it."""
    with suppress(OSError):
        print(f"lockstep agent: {text}", file=sys.stderr, flush=True)
