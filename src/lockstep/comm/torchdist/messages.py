"""What ranks and the supervisor that started them on a host say to each other.

One message is one packet of JSON on a socket that the rank inherits. This module imports the
standard library only, since the supervisor must start without delay.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

MAX_BYTES = 1 << 16
"""Of one message."""

Saying = Literal["meet", "leave", "abort", "built", "agree"]


@dataclass(frozen=True)
class FromRank:
    """What a rank says.

    Attributes:
        say: `meet`: it wants a group, the first one or one without those that are lost; `built`: it
            has built its part of the present one; `agree`: it has arrived where all must before
            the next loss; `leave`: it is done with its group; `abort`: all are to be ended.
        generation: of the group that it speaks of; 0 before the first.
        takes_in: with `meet`, whether newcomers may be in the next group.
        code: with `abort`, the exit code.
    """

    say: Saying
    generation: int
    takes_in: bool = False
    code: int = 1

    def encode(self) -> bytes:
        """As a packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> FromRank:
        """The inverse of `encode`."""
        return cls(**json.loads(packet))


@dataclass(frozen=True)
class ToRank:
    """What the supervisor tells a rank; fields that are None are not told.

    Attributes:
        generation: number of a new group, from 1.
        members: with `generation`, the slots of its members in the order of their ranks.
        newcomer: whether a new process waits to be taken in.
        built: number of the group that all its members have built.
        agree: number of the group whose members have all arrived.
        lost: number of the group that has lost a member or was given up.
        left: the rank's leave was noted; it is told nothing more.
    """

    generation: int | None = None
    members: tuple[int, ...] | None = None
    newcomer: bool | None = None
    built: int | None = None
    agree: int | None = None
    lost: int | None = None
    left: bool | None = None

    def encode(self) -> bytes:
        """As a packet."""
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}).encode()

    @classmethod
    def decode(cls, packet: bytes) -> ToRank:
        """The inverse of `encode`."""
        values: dict[str, Any] = json.loads(packet)
        if "members" in values:
            values["members"] = tuple(values["members"])
        return cls(**values)
