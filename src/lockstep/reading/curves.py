"""A quantity over the steps of a run."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol


class Curve:
    """Values of one quantity, one for each of some steps, ascending.

    Attributes:
        steps: int64.
        values: float64, as many.
    """

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """Append a value; what was there of this step or later ones comes again, so it goes."""
        self.cut(step - 1)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, last: int) -> None:
        """Remove what is of later steps."""
        while self.steps and self.steps[-1] > last:
            self.steps.pop()
            self.values.pop()

    def at(self, step: int) -> float | None:
        """The value of a step; None if there is none."""
        place = bisect_left(self.steps, step)
        found = place < len(self.steps) and self.steps[place] == step
        return self.values[place] if found else None


class CurveStore(Protocol):
    """Takes the values of a run as they come."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step, by the names of their curves."""

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""


class Curves(defaultdict[str, Curve]):
    """A store that keeps every value: curves by name."""

    def __init__(self) -> None:
        super().__init__(Curve)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        for name, value in values.items():
            self[name].add(step, value)

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""
        for curve in self.values():
            curve.cut(last)
