"""The interface between the engine and whatever carries its bytes.

The engine needs data movement only: sums are done by `lockstep.parallel`, in an order that does
not depend on the transport. So a transport moves one-dimensional contiguous tensors and small
JSON values, and any two transports give the same bits.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.calls import KINDS, CallGroup, CallRing, Traffic, measure_of

if TYPE_CHECKING:
    from lockstep.comm.ahead import Started


_Method = TypeVar("_Method", bound=Callable[..., Any])


class GroupBroken(Exception):
    """A collective was not completed: a rank has died, or another one has given the group up.

    Not an error for the user: the engine catches it, calls `Transport.regroup` and goes on.
    """


class Observer(Protocol):
    """What is notified while a process waits for other ranks."""

    def wait(self) -> None:
        """Note that from now on this process may be blocked by other ranks."""

    def go(self) -> None:
        """Note that it is no longer blocked."""

    def on_disk(self) -> AbstractContextManager[None]:
        """Within it, this process may be blocked by a disk."""


class Sending:
    """A message under way; keeps the memory that it is read from."""

    def __init__(self, transport: Transport, handle: Any, tensor: Tensor) -> None:
        self._transport, self._handle, self._tensor = transport, handle, tensor

    def wait(self) -> None:
        """Return when the memory may be used again.

        Raises:
            GroupBroken: a rank was lost, or the group was given up.
        """
        self._transport.finish_sending(self._handle)


class _Nobody:
    def wait(self) -> None:
        pass

    def go(self) -> None:
        pass

    def on_disk(self) -> AbstractContextManager[None]:
        return nullcontext()


def offsets(counts: Sequence[int]) -> list[int]:
    """The start of each part when parts of these sizes lie one behind the other."""
    return [0, *accumulate(counts)][:-1]


def collective(method: _Method) -> _Method:
    """Marks a method in which a rank waits for others, and which fails when one of them is lost.

    Its calls are recorded.
    """
    name = method.__name__
    kind = KINDS.index("all_to_all" if name in ("finish", "gather_among") else name)
    measure = measure_of(name)

    @functools.wraps(method)
    def wrapped(self: Transport, *args: Any, **keys: Any) -> Any:
        calls, is_done = self.call_ring, False
        # Wrong arguments raise here, before anything is noted that would have to be ended.
        place = calls.begin(self.call_group, kind, measure(*args, **keys))
        self.observer.wait()
        try:
            result = method(self, *args, **keys)
            is_done = True
            return result
        except self.failures as error:
            if not self.is_damaged():
                raise
            raise GroupBroken(str(error)) from error
        finally:
            calls.end(place, is_done)
            self.observer.go()

    return cast("_Method", wrapped)


class Transport(ABC):
    """A group of `size` processes, of which this one is number `rank`.

    All ranks call the same methods in the same order. Tensors are one-dimensional, contiguous,
    of equal dtype on all ranks, and lie on the transport's device.

    Every collective may raise `GroupBroken`. A rank that gets it must `regroup`, if the transport
    can, or leave: the others may be waiting for it in another collective.

    Attributes:
        name: name of what carries the bytes.
        rank: position of this process in the present group.
        size: number of processes in the present group.
        can_regroup: whether the group can go on without ranks that die.
        failures: kinds of exception that a collective raises when a rank is lost.
        observer: object that is notified when this process begins and ends to wait for others.
        traffic: how much it has moved, here and in the subgroups.
        call_ring: its newest calls, here and in the subgroups.
        call_group: the present group, in which calls are counted.
    """

    name: str
    rank: int
    size: int
    can_regroup = False
    failures: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.observer: Observer = _Nobody()
        self.traffic = Traffic()
        self.call_ring = CallRing()
        self.call_group = CallGroup(0)

    @abstractmethod
    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Fill `out` with every rank's `own`, one behind the other.

        If it is interrupted, `out` may hold anything, also where `own` was a part of it.

        Args:
            own: this rank's `counts[rank]` elements; may be their own place inside `out`.
            out: memory for `sum(counts)` elements.
            counts: number of elements of each rank.
        """

    def gather_among(self, out: Tensor, ranks: Sequence[int], counts: Sequence[int]) -> None:
        """An all-gather of some ranks, in messages between these; all ranks call this.

        Args:
            out: memory for `sum(counts)` elements, in which this rank's own are in their place; of
                no use on ranks that are not among them.
            ranks: ranks that take part.
            counts: number of elements of each of them.
        """
        raise NotImplementedError(f"{self.name} gathers from all ranks only")

    @abstractmethod
    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """Send a part of `send` to each rank, and receive one from each.

        Args:
            send: elements to send; rank r gets `send[send_offsets[r]:][:send_counts[r]]`.
            send_counts: number of elements for each rank.
            send_offsets: index in `send` of the first element for each rank.
            recv: memory for `sum(recv_counts)` elements, those of ranks 0, 1, … in order.
            recv_counts: number of elements from each rank.
        """

    def runs_ahead(self, num_bytes: int) -> bool:
        """Whether it is better to `start` early what moves so many bytes, alike on all ranks."""
        return False

    def start(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> Started:
        """Begin an `all_to_all`, where this transport `runs_ahead`; all ranks call this.

        This rank's part is not copied. The memory must be left alone until what is returned has
        been waited for. All ranks begin in the same order.
        """
        raise AssertionError(f"{self.name} runs nothing ahead")

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite `tensor` with the one of rank `root`."""

    def send(self, tensor: Tensor, to: int) -> Sending:
        """Begin to send a tensor to a rank, which calls `receive` for each in the same order.

        Nothing else is sent between these two ranks by anybody else meanwhile. The tensor must
        stay as it is until what is returned has been waited for. So no order of sends and
        receives can lock ranks up.
        """
        raise NotImplementedError(f"{self.name} sends nothing to a single rank")

    def finish_sending(self, handle: Any) -> None:
        """What `Sending.wait` calls, with what the library has returned for the message."""
        raise NotImplementedError(f"{self.name} sends nothing to a single rank")

    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with the next one of its size and dtype that a rank has sent here."""
        raise NotImplementedError(f"{self.name} receives nothing from a single rank")

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called this."""

    def agree(self) -> None:
        """Return when all ranks have called this: on all of them, or on none.

        Raises:
            GroupBroken: on every surviving rank.
        """
        self.barrier()

    def is_damaged(self) -> bool:
        """Whether, as far as this rank knows, the group has lost a rank or was given up."""
        return False

    def regroup(self, takes_in: bool = False) -> None:
        """Go on without dead ranks: `rank` and `size` change.

        A collective of the survivors, who keep their order; joining ranks get the highest ranks.

        Args:
            takes_in: whether new processes may join, the same on all ranks.
        """
        raise NotImplementedError(f"{self.name} cannot regroup")

    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The group, of several, that this rank is in; a collective of all ranks.

        It is of the present ranks: after `regroup` new ones are needed. A `GroupBroken` that it
        raises need not mean the loss of a rank: others may have given it up (`give_up`). A
        collective of this transport then decides: it still works if no rank is lost.

        Args:
            groups: ranks of each group, in order; each rank is in exactly one of them.
        """
        raise NotImplementedError(f"{self.name} has no subgroups")

    def give_up(self) -> None:
        """Make collectives of a subgroup raise `GroupBroken` on ranks that wait for this one."""
        raise NotImplementedError(f"{self.name} cannot be given up")

    @property
    def is_joining(self) -> bool:
        """Whether this process has yet to join the others; until then it is a group of one."""
        return False

    @property
    def has_joiner(self) -> bool:
        """Whether, as far as this rank knows, a new process waits to join, or soon may."""
        return False

    def withdraw(self) -> NoReturn:
        """End this process, a joining rank that the others refuse; they see it die and regroup."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("is dead")

    def stop_growing(self) -> None:
        """Start no more new processes; called by all ranks."""
        raise NotImplementedError(f"{self.name} takes in no new processes")

    def share_memory(self) -> None:  # noqa: B027
        """Use shared memory for small all-gathers, where ranks can, until the next regroup.

        A collective. Does nothing where memory is shared already, or this transport cannot.
        """

    @property
    def why_messages(self) -> str | None:
        """Why small all-gathers are messages; empty if they are not, None before the attempt."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def in_stream(self, waits: bool = False) -> AbstractContextManager[None]:
        """Within it, a device's stream waits for collectives, instead of this process.

        Its end raises a `GroupBroken` if they are of no use, since a rank was lost; unless it
        `waits` for them, something that depends on them is to be fetched from the device before.
        """
        return nullcontext()

    def abort(self, exit_code: int) -> None:
        """End this process, and as far as the transport can, all others, now."""
        os._exit(exit_code)

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, in rank order (JSON, since pickles may run code)."""
        payload = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy()
        counts = self.gather_host(torch.tensor([payload.size]), [1] * self.size).tolist()
        raw = self.gather_host(torch.from_numpy(payload), counts).numpy().tobytes()
        return [
            json.loads(raw[start : start + count])
            for start, count in zip(offsets(counts), counts, strict=True)
        ]

    def gather_host(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Every rank's `own`, one behind the other, all in host memory."""
        out = torch.empty(sum(counts), dtype=own.dtype)
        self.all_gather(own, out, counts)
        return out


def count_broadcast(transport: Transport, tensor: Tensor, root: int) -> None:
    """Count in a broadcast."""
    num_bytes, is_root = tensor.nbytes, transport.rank == root
    transport.traffic.add(num_bytes * (transport.size - 1) * is_root, num_bytes * (not is_root))


class LocalTransport(Transport):
    """One process on its own: nothing to move."""

    name = "local"
    rank = 0
    size = 1

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Copy `own` to `out`."""
        if own.data_ptr() != out.data_ptr():
            out.copy_(own)

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """Copy this rank's part to itself."""
        recv.copy_(send[send_offsets[0] : send_offsets[0] + send_counts[0]])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Nothing to do."""

    def barrier(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """This one."""
        return self

    def give_up(self) -> None:
        """Nothing to do: nobody waits."""
