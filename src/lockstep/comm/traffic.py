"""How much a rank has said to the others."""

from __future__ import annotations


class Traffic:
    """Counters of a transport and of its subgroups, since they were made.

    Bytes are those that ranks hand to each other, whatever way the library takes: what this rank
    gave to each of the others, and what it got from them.

    Attributes:
        num_calls: number of collectives, and of messages sent or received.
        sent_bytes: bytes for others.
        received_bytes: bytes from others.
    """

    __slots__ = ("num_calls", "received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.num_calls = self.sent_bytes = self.received_bytes = 0

    def add(self, sent_bytes: int, received_bytes: int) -> None:
        """Count in a call."""
        self.num_calls += 1
        self.add_shared(sent_bytes, received_bytes)

    def add_shared(self, sent_bytes: int, received_bytes: int) -> None:
        """Count in what others have read in this rank's memory, and it in theirs: no call."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
