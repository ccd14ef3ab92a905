"""Values that names come back to: of a name and a step, the last one counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


class Turns:
    """How often names have come to their values, in the order in which these are added.

    Work that is done again after a fault gives each name the same values in the same order. So a
    turn that a file has is told from one that it lacks, also of a value that comes back (1, 2, 1).
    """

    def __init__(self) -> None:
        self._last: dict[str, Hashable] = {}
        self._counts: dict[str, Counter[Hashable]] = {}

    def add(self, name: str, value: Hashable) -> int:
        """Take the next value of a name; returns how often the name has come to it."""
        counts = self._counts.setdefault(name, Counter())
        counts[value] += name not in self._last or self._last[name] != value
        self._last[name] = value
        return counts[value]

    def lacks(self, name: str, value: Hashable, turn: int) -> bool:
        """Whether a name has another value now, and has come to this one less than `turn` times."""
        known = self._counts.get(name, Counter())[value]
        return known < turn and (name not in self._last or self._last[name] != value)

    def forget(self, names: Iterable[str]) -> None:
        """Count the turns of some names anew; the last value of each stays."""
        for name in names:
            self._counts.pop(name, None)

    def forget_all(self) -> None:
        """Count the turns of all names anew; the last value of each stays."""
        self._counts.clear()
