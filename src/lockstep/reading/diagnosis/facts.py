"""What causes are judged by: numbers of the newest sitting of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from lockstep.engine.events import Event, RankLost, RunStarted
from lockstep.engine.flight.story import Logs
from lockstep.reading.diagnosis.calls import Calls
from lockstep.reading.history import History, Process

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Facts:
    """A run's newest sitting in numbers.

    Attributes:
        history: of the run.
        config: of the run, by dotted keys.
        state: as in `lockstep.reading.listing.Summary`.
        calls: of its ranks.
    """

    history: History
    config: Mapping[str, Any]
    state: str
    calls: Calls

    def events(self, kind: type[E]) -> list[E]:
        """The events of a kind in this sitting, in order."""
        happened = self.history.happenings[self.history.first_of_sitting :]
        return [h.event for h in happened if isinstance(h.event, kind)]

    @property
    def logs(self) -> Logs:
        """The newest calls of ranks that wait now, or that could not go on after a loss."""
        return self.calls.logs

    @cached_property
    def lost(self) -> list[RankLost]:
        """The processes that were lost in this sitting, also if nobody was left to report it."""
        reported = self.events(RankLost)
        known = {one.slot for one in reported}
        return reported + [one for one in self.calls.hung if one.slot not in known]

    @cached_property
    def seconds(self) -> float:
        """From the start of training to the newest event; at least a millisecond."""
        began = next(
            (
                h.time
                for h in reversed(self.history.happenings)
                if isinstance(h.event, RunStarted) and not h.event.continued
            ),
            self.history.started,
        )
        return max(1e-3, self.history.newest - began)

    @cached_property
    def workers(self) -> list[Process]:
        """The processes that compute microbatches and have reported what they spent."""
        living = self.history.living
        return [p for p in living if p.num_microbatches and sum(p.seconds.values())]

    def share(self, kind: str) -> float:
        """The part of the sitting that workers have spent with a kind of work: their mean."""
        if not self.workers:
            return 0.0
        return sum(p.seconds[kind] for p in self.workers) / len(self.workers) / self.seconds

    def worst(self, kind: str) -> tuple[Process, float, float]:
        """The worker that has spent most with a kind of work.

        Returns:
            It, its part of the sitting, and the median part of the others; if there are none, 0.
        """
        one = max(self.workers, key=lambda p: p.seconds[kind])
        others = [p.seconds[kind] / self.seconds for p in self.workers if p is not one]
        return one, one.seconds[kind] / self.seconds, median(others) if others else 0.0

    @property
    def on_cpu(self) -> bool:
        """Whether all ranks compute on cores of their hosts."""
        return all(process.joined.device == "cpu" for process in self.history.living)

    @cached_property
    def hosts(self) -> dict[str, tuple[int, int]]:
        """Threads of all ranks, and cores that they may use, by host; where both are known."""
        found: dict[str, tuple[int, int]] = {}
        for process in self.history.living:
            joined = process.joined
            threads, cores = found.get(joined.host, (0, 0))
            found[joined.host] = (threads + joined.threads, max(cores, joined.cores))
        return {host: pair for host, pair in found.items() if pair[1]}
