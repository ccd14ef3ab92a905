"""Evaluations of two runs that must be equal to the bit, and the first one that is not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""A row of `events.jsonl`."""


class Place(NamedTuple):
    """Which evaluation of a run it is."""

    step: int
    split: str
    model_step: int
    """The step whose parameters were evaluated."""

    def __str__(self) -> str:
        """A name for people."""
        of = "" if self.model_step == self.step else f" (state of step {self.model_step})"
        return f"the evaluation of {self.split} after step {self.step}{of}"


def evaluated(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Those rows of a run that are of evaluations, as often as each of them was made."""
    return tuple(row for row in rows if row["event"] == "Evaluated")


def num_evaluations(rows: Iterable[Row]) -> int:
    """How many evaluations such rows are of; one that was made again is no other one."""
    return len(_by_place(rows))


def first_difference(names: tuple[str, str], runs: tuple[Iterable[Row], Iterable[Row]]) -> str:
    """Where the evaluations of two runs first differ; empty if they do not.

    One that was made again, after a loss or by a sitting that went back, must be equal each time.

    Args:
        names: of the runs, for people.
        runs: rows of their evaluations.
    """
    pair = [_by_place(rows) for rows in runs]
    for place in sorted(pair[0].keys() | pair[1].keys()):
        named = list(zip(names, (there.get(place, []) for there in pair), strict=True))
        missing = next((name for name, made in named if not made), None)
        if missing is not None:
            return f"{place} is not in {missing}"
        (first, one), *more = [(name, values) for name, made in named for values in made]
        for last, other in more:
            for metric in {**one, **other}:
                here, there = one.get(metric, "missing"), other.get(metric, "missing")
                if here != there:
                    return f"{place}: {metric} is {here} in {first}, {there} in {last}"
    return ""


def _by_place(rows: Iterable[Row]) -> dict[Place, list[dict[str, str]]]:
    """By place, the values of each time that an evaluation was made."""
    found: dict[Place, list[dict[str, str]]] = {}
    for row in rows:
        model_step = row.get("model_step")
        place = Place(row["step"], row["split"], row["step"] if model_step is None else model_step)
        # Text tells -0.0 from 0.0, and NaN equals NaN.
        values = {n: json.dumps(v) for n, v in {**row["metrics"], **row.get("arrays", {})}.items()}
        found.setdefault(place, []).append(values)
    return found
