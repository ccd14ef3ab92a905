"""A cause, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cause:
    """Why a run is slower than it could be, or has ended.

    Attributes:
        name: a word for programs.
        weight: how heavy it is beside others, from 0 to 1; 1 for what has ended the run.
        sentence: what it is.
        evidence: what it was seen by.
        advice: what to do; names a key where there is one.
        explains: names of causes that are only its effects.
        lost: the part of the sitting that it has cost, from 0 to 1; None if that was not measured.
    """

    name: str
    weight: float
    sentence: str
    evidence: Sequence[str]
    advice: str
    explains: Sequence[str] = field(default=())
    lost: float | None = None


def percent(part: float) -> str:
    """A part as `31 %`."""
    return f"{100 * part:.0f} %"


def measured(
    name: str,
    lost: float,
    sentence: str,
    evidence: Sequence[str],
    advice: str,
    explains: Sequence[str] = (),
) -> Cause:
    """A cause that is as heavy as the part of the sitting that it has cost."""
    return Cause(name, lost, sentence, evidence, advice, explains, lost)
