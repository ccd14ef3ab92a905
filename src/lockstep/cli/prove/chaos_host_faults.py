"""Random faults that strike the hosts of a run: drawn from a seed, and made from outside.

Those here need no root: processes are killed, or stopped for a while, as a pulled cable would keep
them from answering. `tests/campaigns/hosts.py` adds what needs root: networks, disks and clocks of
each host.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lockstep.cli.prove.chaos_hosts import POLL_S, Hosts
from lockstep.errors import LaunchError, RankFailure
from lockstep.launching.host.processes import is_alive, send

_PATIENCE_S = 90.0
"""Seconds after which nothing goes on any more: what starts imports torch, on a busy machine."""
_MOST_GAP_S = 2.0

Undo = Callable[[], None]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        weight: relative frequency.
        strike: makes it on a host, and returns what ends it; None if nothing has to.
        lasts: whether it lasts for a while.
        loses: whether the others may go on without the host, or have to.
        cuts: whether the host goes on by itself; as the coordinator's, the others go on with it.
        ends: whether the run ends everywhere if the host is the coordinator's, without etcd.
        only: whether it strikes the coordinator's host.
    """

    weight: int
    strike: Callable[[int], Undo | None]
    lasts: bool = True
    loses: bool = True
    cuts: bool = False
    ends: bool = False
    only: bool = False


@dataclass
class Struck:
    """A fault that has struck.

    Attributes:
        step: newest step at that time.
        kind: name of its kind.
        host: host that it struck.
        lasted_s: seconds until it was undone; 0 if there was nothing to undo.
        pause_s: longest time without a new step from then on, until the next fault.
        has_ended: whether the run ended, and was started again.
    """

    step: int
    kind: str
    host: int
    lasted_s: float = 0.0
    pause_s: float = 0.0
    has_ended: bool = False


@dataclass
class _Lasting:
    """A fault that is to be undone."""

    host: int
    until: float
    undo: Undo
    is_lost: bool = True
    starts: bool = False


@dataclass
class Faults:
    """Draws faults and makes them; some host always stays that has the state of the run.

    Attributes:
        hosts: hosts that they strike.
        source: what they are drawn with.
        kinds: kinds of faults by name; those that need no root at first.
    """

    hosts: Hosts
    source: random.Random
    kinds: dict[str, Kind] = field(init=False)
    _lasting: list[_Lasting] = field(default_factory=list)
    _alone: bool = False
    _step: int = 0
    _since: float = 0.0
    _now: Struck | None = None

    def __post_init__(self) -> None:
        self.kinds = {
            "rank": Kind(4, self._kill_rank, lasts=False),
            "agent": Kind(2, self._kill_agent, ends=True),
            "host": Kind(2, self._kill_host, ends=True),
            "pause": Kind(2, self._stop, cuts=True),
            "coordinator": Kind(1, self._kill_any, ends=True, only=True),
            "store": Kind(1, self._kill_store, lasts=False, loses=False),
        }

    def strike_all(self, number: int) -> Iterator[Struck]:
        """Strike until there were so many faults, or the run is over.

        Yields:
            Each fault, when all that follows from it was seen.

        Raises:
            LaunchError: nothing goes on any more, or something has ended that should not.
        """
        self._wait(self._are_whole)
        for left in range(number, 0, -1):
            kinds = self._kinds_now()
            name = self.source.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
            fraction, seconds = self.source.random(), self.source.uniform(0.1, 2.5)
            gap_s, overlaps = self.source.uniform(0.0, _MOST_GAP_S), self.source.random() < 0.5
            kind, victims = kinds[name], list[int]()
            while not victims and not self.hosts.are_over():
                victims = self._with_target(name, self._victims(name, kind))
                if not victims:
                    self._wait(lambda: not self._lasting and self._are_whole())
            if self.hosts.are_over():
                return
            yield self._strike(name, kind, victims, fraction, seconds, gap_s, overlaps and left > 1)

    def _strike(
        self,
        name: str,
        kind: Kind,
        victims: Sequence[int],
        fraction: float,
        seconds: float,
        gap_s: float,
        overlaps: bool,
    ) -> Struck:
        host = victims[int(fraction * len(victims))]
        leads = host == self.hosts.coordinator()
        struck = self._now = Struck(self.hosts.step(), name, host)
        self._since = time.monotonic()
        undo = kind.strike(host)
        if leads and kind.ends and not self.hosts.has_election:
            struck.has_ended = True
            self._begin_again(host)
        elif undo is not None:
            struck.lasted_s = seconds * self.hosts.timeout_s
            self._alone = leads and kind.cuts and not self.hosts.has_election
            until = time.monotonic() + struck.lasted_s
            self._lasting.append(_Lasting(host, until, undo, kind.loses, kind.ends))
        until = time.monotonic() + gap_s
        self._wait(lambda: time.monotonic() > until)
        if not overlaps or self._alone or struck.has_ended:
            self._wait(self._are_whole)
            self._alone = False
        return struck

    def end(self) -> set[int]:
        """Undo what is left, when it is due, and wait until all hosts are there again.

        Returns:
            Hosts that were still killed when the run came to its end: there is nothing to join.
        """
        self._wait(lambda: not self._lasting and self._are_whole())
        lost = {lasting.host for lasting in self._lasting if lasting.starts}
        self._lasting = [lasting for lasting in self._lasting if not lasting.starts]
        self.undo_all()
        return lost

    def undo_all(self) -> None:
        """Undo what is left at once."""
        for lasting in self._lasting:
            with contextlib.suppress(OSError):
                lasting.undo()
        self._lasting.clear()

    def _with_target(self, name: str, hosts: Sequence[int]) -> list[int]:
        """Those of some hosts that have what a kind of fault kills."""
        targets = {"rank": self.hosts.ranks, "store": self.hosts.store}
        return [host for host in hosts if name not in targets or targets[name](host)]

    def _kinds_now(self) -> dict[str, Kind]:
        return self.kinds

    def _victims(self, name: str, kind: Kind) -> list[int]:
        """The hosts that a kind of fault may strike now."""
        busy = {lasting.host for lasting in self._lasting}
        free = [host for host in range(self.hosts.num_hosts) if host not in busy]
        leader = self.hosts.coordinator()
        if not kind.loses:
            return free
        # Most of etcd's servers have to stay; and who starts all again has to be free to.
        if busy and ((kind.lasts and self.hosts.has_election) or kind.only):
            return []
        whole = [host for host in free if len(self.hosts.holders(host)) == self.hosts.num_ranks]
        if kind.only:
            return [leader] if leader in free and len(whole) == self.hosts.num_hosts else []
        safe = [host for host in free if any(other != host for other in whole)]
        if self.hosts.has_election:
            return safe
        if kind.ends:
            return [host for host in safe if host != leader]
        if kind.cuts and (busy or len(whole) < self.hosts.num_hosts):
            return [host for host in safe if host != leader]
        return safe

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Undo what is due, and look how steps go on, until something is so or the run is over."""
        began = time.monotonic()
        while not is_done() and not self.hosts.are_over():
            now = time.monotonic()
            for lasting in [lasting for lasting in self._lasting if lasting.until <= now]:
                self._lasting.remove(lasting)
                with contextlib.suppress(ProcessLookupError):
                    lasting.undo()
            if (step := self.hosts.step()) != self._step:
                self._step, self._since = step, now
            if self._now is not None:
                self._now.pause_s = max(self._now.pause_s, now - self._since)
            struck = {lasting.host for lasting in self._lasting}
            for host, agent in self.hosts.agents.items():
                if host not in struck and agent.poll():
                    raise LaunchError(
                        f"the agent of host {host} has ended with exit code {agent.returncode}, "
                        f"which no fault explains{self.hosts.told}"
                    )
            if now > began + _PATIENCE_S:
                raise LaunchError(
                    f"hosts have not come back within {_PATIENCE_S:g} s{self.hosts.told}"
                )
            time.sleep(POLL_S)

    def _are_whole(self) -> bool:
        """Whether all hosts are in the group again that nothing strikes now."""
        lost = {lasting.host for lasting in self._lasting if lasting.is_lost}
        if self._alone and lost:
            return False
        return all(
            len(self.hosts.holders(host)) == self.hosts.num_ranks
            for host in range(self.hosts.num_hosts)
            if host not in lost
        )

    def _begin_again(self, host: int) -> None:
        """Have the run end on all other hosts, with the code to try again, and start it again."""
        self.undo_all()
        codes = self.hosts.codes(_PATIENCE_S)
        others = [code for other, code in enumerate(codes) if other != host]
        if set(others) != {RankFailure.exit_code}:
            raise LaunchError(
                f"the coordinator on host {host} was lost, and agents ended with {others} instead "
                f"of {RankFailure.exit_code}{self.hosts.told}"
            )
        self.hosts.check_gone()
        self.hosts.resume()

    def _kill_rank(self, host: int) -> None:
        if ranks := self.hosts.ranks(host):
            end(self.source.choice(ranks))

    def _kill_agent(self, host: int) -> Undo:
        self.hosts.agents[host].kill()
        self.hosts.agents[host].wait()
        return lambda: self.hosts.start(host)

    def _kill_host(self, host: int) -> Undo:
        self.hosts.kill(host)
        return lambda: self.hosts.start(host)

    def _kill_any(self, host: int) -> Undo:
        kill = self.source.choice([self._kill_agent, self._kill_host])
        return kill(host)

    def _kill_store(self, host: int) -> None:
        store = self.hosts.store(host)
        if store is not None:
            os.kill(store, signal.SIGKILL)

    def _stop(self, host: int) -> Undo:
        pids = self.hosts.pids(host)
        send(pids, signal.SIGSTOP)
        return lambda: send(pids, signal.SIGCONT)


def end(pid: int) -> None:
    """Kill a process, and wait until it counts no longer as one that has the state of the run."""
    send([pid], signal.SIGKILL)
    while is_alive(pid):
        time.sleep(POLL_S)


def render_struck(all_struck: Sequence[Struck]) -> Table:
    """A table with a row for each fault."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("#", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("fault", "host"):
        table.add_column(name, no_wrap=True)
    for name in ("for", "longest pause"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for number, struck in enumerate(all_struck, 1):
        lasted = f"{struck.lasted_s:.1f} s" if struck.lasted_s else ""
        again = "all started again" if struck.has_ended else ""
        table.add_row(
            *(str(number), str(struck.step), struck.kind, str(struck.host), lasted),
            *(f"{struck.pause_s:.1f} s", again),
        )
    return table
