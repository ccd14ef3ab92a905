"""One finding of `lockstep doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: name of what was checked.
        status: `skip` where this machine has no such thing, which is fine.
        detail: description of what was found.
        fix: command or advice that mends it; empty if nothing is to be done.
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
