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
        origins: int64, as many: the first step that a value comes from. It is the step itself, but
            for means over several steps, and for evaluations of older parameters.
    """

    __slots__ = ("origins", "steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.origins = array("q")

    def add(self, step: int, value: float, origin: int | None = None) -> None:
        """Append a value; what was there of this step or later ones comes again, so it goes.

        Args:
            step: of the value.
            value: to append.
            origin: the first step that it comes from; the step itself if left out.

        Raises:
            TypeError: the value is no number; nothing is appended then.
            OverflowError: what is given is larger than the curve can hold; nothing is appended.
        """
        steps = array("q", (step, step if origin is None else origin))
        values = array("d", (value,))
        self.cut(step - 1)
        self.steps.append(steps[0])
        self.values.append(values[0])
        self.origins.append(steps[1])

    def cut(self, last: int) -> None:
        """Remove what is of later steps."""
        while self.steps and self.steps[-1] > last:
            self.steps.pop()
            self.values.pop()
            self.origins.pop()

    def at(self, step: int, origin: int | None = None) -> float | None:
        """The value of a step; None if there is none, or if it comes from others than asked for."""
        place = bisect_left(self.steps, step)
        found = place < len(self.steps) and self.steps[place] == step
        is_meant = found and origin in (None, self.origins[place])
        return self.values[place] if is_meant else None


class CurveStore(Protocol):
    """Takes the values of a run as they come."""

    def add(self, step: int, values: Mapping[str, float], origin: int | None = None) -> None:
        """Take values, by the names of their curves.

        Args:
            step: of the values.
            values: by name.
            origin: the first step that they come from; the step itself if left out.
        """

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""


class Curves(defaultdict[str, Curve]):
    """A store that keeps every value: curves by name."""

    def __init__(self) -> None:
        super().__init__(Curve)

    def add(self, step: int, values: Mapping[str, float], origin: int | None = None) -> None:
        """Append the values of a step."""
        for name, value in values.items():
            self[name].add(step, value, origin)

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""
        for curve in self.values():
            curve.cut(last)
