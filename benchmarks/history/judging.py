"""From ratios of times, taken in turn, to a verdict; and the first commit with a bad one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
MARGIN = 0.03
"""Part of a time by which another one must differ, to be called so."""


@dataclass(frozen=True)
class Ratio:
    """How many times as long one revision takes as another.

    Attributes:
        median: of the rounds.
        low: least value that the median of many rounds may have, with a confidence of `CONFIDENCE`.
        high: greatest such value.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """The median of ratios, and its bounds by order statistics.

        The number of ratios below the true median is binomial, whatever their distribution is
        (H. A. David, H. N. Nagaraja, "Order Statistics", 3rd edition, section 7.1).

        Raises:
            ValueError: there are too few of them for a bound.
        """
        count, ordered = len(ratios), sorted(ratios)
        cut = 0
        while 1 - 2 * sum(math.comb(count, k) for k in range(cut + 1)) / 2**count >= CONFIDENCE:
            cut += 1
        if not cut:
            raise ValueError(f"{count} rounds say nothing for sure: at least 6")
        return cls(statistics.median(ordered), ordered[cut - 1], ordered[count - cut])

    @property
    def verdict(self) -> Literal["slower", "faster", "alike"]:
        """Whether the time differs by more than `MARGIN`, for sure."""
        if self.low > 1 + MARGIN:
            return "slower"
        return "faster" if self.high < 1 - MARGIN else "alike"


def first_slower(commits: Sequence[str], is_slower: Callable[[str], bool | None]) -> list[str]:
    """The commit that made something slower, by bisection.

    Args:
        commits: from the first one after a good one to a bad one.
        is_slower: whether a commit is as slow as the bad one; None where it cannot be measured.

    Returns:
        One commit; several, if those between could not be measured.
    """
    good, bad = -1, len(commits) - 1
    unknown: set[int] = set()
    while between := [n for n in range(good + 1, bad) if n not in unknown]:
        middle = min(between, key=lambda n: abs(n - (good + bad) / 2))
        found = is_slower(commits[middle])
        if found is None:
            unknown.add(middle)
        elif found:
            bad = middle
        else:
            good = middle
    return list(commits[good + 1 : bad + 1])
