"""All-to-alls that go on while a process computes, and all-gathers in few messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.mailbox import HostTransport
from lockstep.comm.transport import GroupBroken, collective

FEW_RANKS = 16
"""Among so many, each part goes straight to every rank: all messages at once, instead of some
rounds one after another. Among more, the number of messages would be what takes time."""


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; one of host memory goes there without a wait, if it can be pinned."""
    if tensor.is_cpu and device.type != "cpu":
        with suppress(RuntimeError):
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def host_memory(num: int, device: torch.device) -> Tensor:
    """Float64 [num] that is copied to a device without waiting, where the device can do that."""
    try:
        return torch.empty(num, dtype=torch.float64, pin_memory=device.type != "cpu")
    except RuntimeError:
        return torch.empty(num, dtype=torch.float64)


class Round(NamedTuple):
    """What a rank sends and receives at a time in an all-gather by doubling.

    Attributes:
        to: place of the rank that gets the parts of `given`.
        given: parts, by place; one range, or two where they go round the end.
        source: place of the rank that sends those of `taken`.
        taken: likewise.
    """

    to: int
    given: list[range]
    source: int
    taken: list[range]


def doubling(place: int, size: int) -> Iterator[Round]:
    """The rounds of an all-gather of `size` ranks, log2 of them, for the one at a place.

    Each rank has twice as many parts after each round. In all it gets each part once, as if these
    came straight from their owners (Bruck et al. 1997, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", section 4), and each is where it stays.
    """
    known = 1
    while known < size:
        num = min(known, size - known)
        source = (place + known) % size
        yield Round((place - known) % size, _round(place, num, size), source,
                    _round(source, num, size))  # fmt: skip
        known += num


def _round(first: int, num: int, size: int) -> list[range]:
    """Parts from one on, the first one after the last."""
    end = first + num
    return [range(first, end)] if end <= size else [range(first, size), range(end - size)]


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

    @collective
    def gather_among(self, out: Tensor, ranks: Sequence[int], counts: Sequence[int]) -> None:
        """See `Transport.gather_among`."""
        own = counts[ranks.index(self.rank)] if self.rank in ranks else 0
        size, others = out.itemsize, len(ranks) - 1
        self.traffic.add(own * others * size, (len(out) - own) * size if self.rank in ranks else 0)
        if self.rank in ranks:
            self._gather(out, ranks, counts)

    def _gather(self, out: Tensor, ranks: Sequence[int], counts: Sequence[int]) -> None:
        """Gather the parts of some ranks, this one among them, whose own is in its place."""
        bounds = [*accumulate(counts, initial=0)]

        def parts(of: Sequence[range]) -> list[Tensor]:
            ends = [(bounds[r.start], bounds[r.stop]) for r in of]
            return [out[first:last] for first, last in ends if last > first]

        place, size = ranks.index(self.rank), len(ranks)
        if size > FEW_RANKS:
            for to, given, source, taken in doubling(place, size):
                self._trade(
                    [(part, ranks[to]) for part in parts(given)],
                    [(part, ranks[source]) for part in parts(taken)],
                )
            return
        others = [(place + n) % size for n in range(1, size)]
        self._trade(
            [(part, ranks[other]) for other in others for part in parts([range(place, place + 1)])],
            [(part, ranks[other]) for other in others for part in parts([range(other, other + 1)])],
        )

    @abstractmethod
    def _trade(
        self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send tensors, and fill others with what comes; each with the rank it goes to or is of."""

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
