"""One finding of `lockstep doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """What was looked at and how it is.

    Attributes:
        name: what was looked at.
        status: `skip` where this machine has no such thing, which is fine.
        detail: what was found.
        fix: what to do about it, if anything.
    """

    name: str
    status: Literal["ok", "fail", "skip"]
    detail: str
    fix: str = ""


def guarded(name: str, look: Callable[[], Check], fix: str = "") -> Check:
    """The check that `look` returns; failed, if it raises."""
    try:
        return look()
    except Exception as error:  # a doctor must survive what it finds
        return Check(name, "fail", f"{type(error).__name__}: {error}", fix)
