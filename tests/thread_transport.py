"""Several ranks in one process: a transport whose ranks are threads."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.comm.mailbox import AheadTransport
from lockstep.comm.transport import Sending, Transport

T = TypeVar("T")


class Meeting:
    """Where the threads of a group swap values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self._values: list[Any] = [None] * size
        pairs = list(itertools.product(range(size), repeat=2))
        self.messages = {pair: queue.SimpleQueue[Tensor]() for pair in pairs}
        self.started = {pair: queue.SimpleQueue[tuple[int, Tensor]]() for pair in pairs}

    def swap(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values


class ThreadTransport(AheadTransport):
    """Checks the contract of every call, and keeps their names in `calls`."""

    name = "threads"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = meeting.size
        self.calls: list[str] = []
        self._meeting = meeting
        self._num_begun: Counter[tuple[str, int]] = Counter()
        self._arrived: dict[tuple[int, int], Tensor] = {}

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        assert len(own) == counts[self.rank]
        assert len(out) == sum(counts)
        parts = self._swap("all_gather", own)
        assert [len(p) for p in parts] == list(counts)
        for place, part in zip(torch.split(out, list(counts)), parts, strict=True):
            place.copy_(part)

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        assert len(recv) == sum(recv_counts)
        pairs = list(zip(send_offsets, send_counts, strict=True))
        assert all(first >= 0 and first + count <= len(send) for first, count in pairs if count)
        everyone = self._swap("all_to_all", send, pairs)
        for place, (theirs, their_pairs) in zip(
            torch.split(recv, list(recv_counts)), everyone, strict=True
        ):
            first, count = their_pairs[self.rank]
            assert len(place) == count
            place.copy_(theirs[first : first + count])

    def runs_ahead(self, num_bytes: int) -> bool:
        return True

    def _begin(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> dict[tuple[int, int], Tensor]:
        coming = {}
        for rank, part in enumerate(torch.split(recv, list(recv_counts))):
            if rank == self.rank:
                continue
            first, count = send_offsets[rank], send_counts[rank]
            if count:
                message = self._next("to", rank), send[first : first + count].clone()
                self._meeting.started[self.rank, rank].put(message)
            if len(part):
                part.fill_(float("nan"))  # as long as it travels nobody may read it
                coming[rank, self._next("from", rank)] = part
        return coming

    def _next(self, way: str, rank: int) -> int:
        """The number of a message: those between two ranks are matched in the order of `start`."""
        self._num_begun[way, rank] += 1
        return self._num_begun[way, rank]

    def _end(self, handle: dict[tuple[int, int], Tensor]) -> None:
        for (rank, number), part in handle.items():
            while (rank, number) not in self._arrived:
                theirs, content = self._meeting.started[rank, self.rank].get(timeout=30)
                self._arrived[rank, theirs] = content
            part.copy_(self._arrived.pop((rank, number)))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self._swap("broadcast", tensor)[root])

    def send(self, tensor: Tensor, to: int) -> Sending:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        self._meeting.messages[self.rank, to].put(tensor.clone())
        return Sending(self, None, tensor)

    def finish_sending(self, handle: Any) -> None:
        pass

    def receive(self, tensor: Tensor, source: int) -> None:
        sent = self._meeting.messages[source, self.rank].get(timeout=30)
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(sent)

    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        own = next(group for group in groups if self.rank in group)
        meetings = self._meeting.swap(self.rank, Meeting(len(own)))
        return ThreadTransport(meetings[own[0]], own.index(self.rank))

    def barrier(self) -> None:
        self._meeting.barrier.wait()

    def close(self) -> None:
        pass

    def _swap(self, call: str, tensor: Tensor, *more: Any) -> list[Any]:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        self.calls.append(call)
        everyone = self._meeting.swap(self.rank, (call, tensor.dtype, tensor.clone(), *more))
        assert {e[:2] for e in everyone} == {(call, tensor.dtype)}
        return [e[2:] if more else e[2] for e in everyone]


def on_ranks(size: int, body: Callable[[ThreadTransport], T]) -> list[T]:
    """What `body` returns on each of `size` ranks; raises the first error of any of them."""
    meeting = Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadTransport(meeting, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert len(results) == size, "a rank waited for a call the others did not make"
    return [results[rank] for rank in range(size)]
