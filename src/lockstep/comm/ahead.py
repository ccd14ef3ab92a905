"""All-to-alls that go on while a process computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.mailbox import HostTransport
from lockstep.comm.transport import GroupBroken, collective


class Started:
    """An all-to-all under way.

    Attributes:
        handle: what the library has returned; None when it was waited for, or given up.
        moved: bytes that this rank gives and has afterwards, and -1, as calls are recorded.
    """

    def __init__(self, transport: AheadTransport, handle: Any, moved: tuple[int, int, int]) -> None:
        self._transport, self.handle, self.moved = transport, handle, moved
        transport.under_way.append(self)

    def wait(self) -> None:
        """Return when all has arrived, and memory that was sent may be used again.

        Raises:
            GroupBroken: a rank was lost, or the group was given up.
        """
        if self.handle is None:
            raise GroupBroken("the group was given up")
        try:
            self._transport.finish(self)
        finally:
            self.end()

    def end(self) -> None:
        """Note that it is over."""
        self.handle = None
        self._transport.under_way.remove(self)


class AheadTransport(HostTransport):
    """A transport that can move messages while this process computes.

    Attributes:
        under_way: what `start` has begun and nobody has waited for yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Started] = []

    def start(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> Started:
        """See `Transport.start`."""
        given = (sum(send_counts) - send_counts[self.rank]) * send.itemsize
        taken = (sum(recv_counts) - recv_counts[self.rank]) * recv.itemsize
        self.traffic.add(given, taken)
        try:
            handle = self._begin(send, send_counts, send_offsets, recv, recv_counts)
        except self.failures as error:
            if not self.is_damaged():
                raise
            raise GroupBroken(str(error)) from error
        return Started(self, handle, (given, recv.nbytes, -1))

    @abstractmethod
    def _begin(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> Any:
        """Begin what `start` does; returns what `_end` is given."""

    @abstractmethod
    def _end(self, handle: Any) -> None:
        """Wait for what `_begin` has begun."""

    @collective
    def finish(self, started: Started) -> None:
        """What `Started.wait` calls."""
        # Recorded as an all-to-all of this moment: until now no rank has waited for another one.
        self._end(started.handle)
