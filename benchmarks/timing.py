"""Functions of one process, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from page import Section, duration, ratio
from processes import Spread

Work = Callable[[], Any]


def timed(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work, in turn; each round the mean over about a fifth of a second."""
    counts = {}
    for name, work in works.items():
        work()
        started = time.perf_counter()
        work()
        counts[name] = max(1, int(0.2 / (time.perf_counter() - started)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            for _ in range(counts[name]):
                work()
            times[name].append((time.perf_counter() - started) / counts[name])
    return times


def add_rows(section: Section, times: Mapping[str, list[float]], reference: str) -> None:
    for name, found in times.items():
        faster = "" if name == reference else ratio(Spread.of_ratios(times[reference], found))
        section.rows.append([name, duration(Spread.of(found)), faster])
