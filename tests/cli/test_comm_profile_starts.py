"""Ranks that begin calls together, though each has a clock of its own and hears late of others."""

import statistics
import threading
import time
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.cli.clusters import comm_profile_meter as starting
from lockstep.cli.clusters.comm_profile_meter import AgreedStart, start_of

CPU = torch.device("cpu")
DELAY_S = 0.02


class Clock(threading.local):
    """A clock for each thread."""

    ahead_s, rate = 0.0, 1.0

    def __call__(self) -> float:
        return self.ahead_s + self.rate * time.perf_counter()


class Far(ThreadTransport):
    """Ranks hear of each other later, the higher their number."""

    def all_gather(self, own: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> None:
        super().all_gather(own, out, counts)
        time.sleep(DELAY_S * self.rank)


def spreads_s(ahead_s: Sequence[float], rates: Sequence[float], seconds: float) -> list[float]:
    """How far apart ranks with these clocks begin, for each of the starts of some time."""
    clock = Clock()
    num_starts = int(seconds / (DELAY_S * len(ahead_s)))

    def body(transport: ThreadTransport) -> list[float]:
        transport.__class__ = Far
        clock.ahead_s, clock.rate = ahead_s[transport.rank], rates[transport.rank]
        start, began = AgreedStart(transport, CPU), []
        for _ in range(num_starts):
            start()
            began.append(time.perf_counter())
        return began

    with patch.object(starting, "perf_counter", clock):
        everyone = on_ranks(len(ahead_s), body)
    return [max(each) - min(each) for each in zip(*everyone, strict=True)]


def test_ranks_that_hear_late_that_all_have_come_begin_together() -> None:
    found = spreads_s([0.0, 1000.0, -50.0], [1.0] * 3, 0.6)
    assert statistics.median(found) < DELAY_S / 2  # and two delays without an agreement


def test_clocks_that_drift_are_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_COMPARED_FOR_S", 0.05)
    found = spreads_s([5.0, 0.0], [1.0, 1.1], 1.0)
    assert statistics.median(found[-5:]) < DELAY_S  # and 0.1 s otherwise


def test_ranks_of_one_host_begin_when_all_have_come() -> None:
    def body(transport: ThreadTransport) -> tuple[float, float]:
        start = start_of(transport, CPU)
        if transport.rank == 1:
            time.sleep(DELAY_S)
        came = time.perf_counter()
        start()
        return came, time.perf_counter()

    (_, first), (last, _) = on_ranks(2, body)
    assert first >= last
