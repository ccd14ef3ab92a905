"""The engine's bytes over a torch.distributed process group: gloo, NCCL, or any other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from lockstep.comm.ahead import FEW_RANKS, AheadTransport, moved
from lockstep.comm.calls import CallGroup
from lockstep.comm.torchdist.store import check_interfaces, meet_at
from lockstep.comm.transport import (
    GroupBroken,
    Sending,
    Transport,
    collective,
    count_broadcast,
    offsets,
)
from lockstep.errors import EnvironError, LockstepError, alone

_NUM_TAGS = 1 << 20
"""Of what `start` begins; messages of `send` have another one, 0."""
_PIECE_BYTES = 2 << 20
"""About the most bytes that an all-gather of parts of several sizes receives at a time."""
_SHORT = 2048
"""Bytes of a value as JSON, with its length, that go round a device's group at once."""
_TRADED = _NUM_TAGS + 1
"""Tag of the messages of all-gathers."""


class _Messages:
    """Several messages as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class GroupTransport(AheadTransport):
    """Moves tensors with a `torch.distributed.ProcessGroup`, or a backend of one.

    Attributes:
        group: process group of the present ranks.
        back: the same for messages to lower ranks, where those of both directions would wait for
            each other: NCCL does all messages of two ranks one after the other.
        device: device that tensors lie on.
    """

    failures = (RuntimeError,)
    group: Any
    back: Any = None
    _num_started = 0
    _is_in_stream = False

    def __init__(self, backend: str, device: torch.device | None) -> None:
        super().__init__()
        self.name = backend
        self.device = device or torch.device("cpu")

    @collective
    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """See `Transport.all_gather`."""
        if self._gathers(own, out, counts):
            return
        longest, num_own, size = max(counts), own.numel(), out.itemsize
        self.traffic.add(num_own * (self.size - 1) * size, (out.numel() - num_own) * size)
        if self._has_messages and self.size > FEW_RANKS:
            mine = out[sum(counts[: self.rank]) :][:num_own]
            if own.data_ptr() != mine.data_ptr():
                mine.copy_(own)
            self._gather(out, range(self.size), counts)
            return
        if min(counts) == longest:
            self._finish(self.group._allgather_base(out, own))
            return
        # Process groups gather parts of equal size only: here piece by piece, to spare memory.
        length = min(longest, max(1, _PIECE_BYTES // (size * self.size)))
        padded, everyone = out.new_zeros(length), out.new_empty(self.size, length)
        for first in range(0, longest, length):
            mine = own[first : first + length]
            padded[: mine.numel()] = mine
            self._finish(self.group._allgather_base(everyone.view(-1), padded))
            for rows, start, count in zip(everyone, offsets(counts), counts, strict=True):
                there = out[start + first : start + min(count, first + length)]
                there.copy_(rows[: there.numel()])

    @collective
    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        size, to_self = send.itemsize, send_counts[self.rank]
        self.traffic.add((sum(send_counts) - to_self) * size, (recv.numel() - to_self) * size)
        if self._has_messages and self.size > FEW_RANKS:
            # The library's collective sends a message to each rank, also where there is nothing.
            here = recv[sum(recv_counts[: self.rank]) :][:to_self]
            here.copy_(send[send_offsets[self.rank] :][:to_self])
            handle = self._begin(send, send_counts, send_offsets, recv, recv_counts)
            self._finish(handle, is_message=True)
            return
        own = _in_a_row(send, send_counts, send_offsets)
        self._finish(self.group.alltoall_base(recv, own, list(recv_counts), list(send_counts)))

    def runs_ahead(self, num_bytes: int) -> bool:
        """See `Transport.runs_ahead`: gloo's threads move messages, whatever this one does."""
        return self._has_messages and self._is_long(num_bytes)

    @property
    def _has_messages(self) -> bool:
        """Whether threads of the library move messages between two ranks."""
        return self.name == "gloo" and self.device.type == "cpu"

    def _trade(
        self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]
    ) -> None:
        works = [self.group.recv([tensor], source, _TRADED) for tensor, source in taken]
        works += [self.group.send([tensor], to, _TRADED) for tensor, to in given]
        self._finish(_Messages(works), is_message=True)

    def _begin(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> _Messages:
        # Messages, since they go from memory to memory: a collective of gloo copies parts of
        # unequal size, and has two threads for all that is under way.
        self._num_started += 1
        tag = self._num_started % _NUM_TAGS + 1
        others = [(self.rank + n) % self.size for n in range(1, self.size)]
        starts, works = offsets(recv_counts), []
        for rank in reversed(others):
            if count := recv_counts[rank]:
                works.append(self.group.recv([recv[starts[rank] :][:count]], rank, tag))
        for rank in others:
            if count := send_counts[rank]:
                works.append(self.group.send([send[send_offsets[rank] :][:count]], rank, tag))
        return _Messages(works)

    def _end(self, handle: _Messages) -> None:
        self._finish(handle, is_message=True)

    @collective
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Transport.broadcast`."""
        count_broadcast(self, tensor, root)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._finish(self.group.broadcast([tensor], options))

    @collective
    def send(self, tensor: Tensor, to: int) -> Sending:
        """See `Transport.send`."""
        self.traffic.add(tensor.numel() * tensor.itemsize, 0)
        group = self.back if self.back is not None and to < self.rank else self.group
        return Sending(self, group.send([tensor], to, 0), tensor)

    @collective
    def finish_sending(self, handle: Any) -> None:
        """See `Transport.finish_sending`."""
        self._finish(handle, is_message=True)

    @collective
    def receive(self, tensor: Tensor, source: int) -> None:
        """See `Transport.receive`."""
        self.traffic.add(0, tensor.numel() * tensor.itemsize)
        group = self.back if self.back is not None and source > self.rank else self.group
        self._finish(group.recv([tensor], source, 0), is_message=True)

    def gather_host(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """See `Transport.gather_host`; staged where the backend moves device memory only."""
        out = torch.empty(sum(counts), dtype=own.dtype, device=self.device)
        self.all_gather(moved(own, self.device), out, counts)
        return out.cpu()

    def gather_json(self, value: Any) -> list[Any]:
        """See `Transport.gather_json`; short values come from a device by one message."""
        if self.device.type == "cpu":
            return super().gather_json(value)
        text = json.dumps(value).encode()
        first = torch.zeros(_SHORT, dtype=torch.uint8)
        first[:8] = torch.tensor([len(text)]).view(torch.uint8)
        head = torch.frombuffer(bytearray(text[: _SHORT - 8]), dtype=torch.uint8)
        first[8 : 8 + len(head)] = head
        rows = self.gather_host(first, [_SHORT] * self.size).view(self.size, _SHORT)
        lengths = [int(row[:8].view(torch.int64)) for row in rows]
        if max(lengths) > _SHORT - 8:
            return super().gather_json(value)
        return [
            json.loads(row[8 : 8 + length].numpy().tobytes())
            for row, length in zip(rows, lengths, strict=True)
        ]

    def share_memory(self) -> None:
        """See `Transport.share_memory`."""
        if self.device.type == "cpu":
            super().share_memory()

    @contextmanager
    def in_stream(self, waits: bool = False) -> Iterator[None]:
        """See `Transport.in_stream`; tensors lie on a device."""
        before, self._is_in_stream = self._is_in_stream, True
        try:
            yield
            if waits:
                self.observer.wait()
                torch.accelerator.current_stream(self.device).synchronize()
            self._look()
        except Exception as error:
            # What a collective that was aborted leaves may make no sense to who reads it. Errors
            # that all ranks have agreed on came by collectives that were not.
            is_shared = isinstance(error, LockstepError) and error.is_shared
            if is_shared or isinstance(error, GroupBroken) or not self.is_damaged():
                raise
            raise GroupBroken(str(error)) from error
        finally:
            self._is_in_stream = before
            self.observer.go()

    def _finish(self, work: Any, is_message: bool = False) -> None:
        """Wait for a collective, or for a message to or from one rank."""
        work.wait()


class Subgroup(GroupTransport):
    """Some ranks of a group, see `Transport.subgroup`."""

    def __init__(
        self, whole: GroupTransport, group: Any, rank: int, size: int, calls: CallGroup
    ) -> None:
        """Use a process group that was made for it.

        Args:
            whole: transport of all ranks.
            group: process group of the ranks of this one.
            rank: rank of this process in it.
            size: number of its ranks.
            calls: the same group, as calls are counted in it.
        """
        super().__init__(whole.name, whole.device)
        self._join_records(whole, calls)
        self.group, self.rank, self.size = group, rank, size
        self._timeout_s = whole._timeout_s

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.gather_host(torch.zeros(1), [1] * self.size)

    def give_up(self) -> None:
        """Nothing to do: such a group cannot go on without a rank, so no rank needs to be woken."""

    def is_damaged(self) -> bool:
        """Always: whether a rank is lost, the ranks of all the group find out."""
        return True

    def close(self) -> None:
        """Release the process group."""
        self.group = self.back = None


class ProcessGroupTransport(GroupTransport):
    """The default process group, made here and destroyed by `close`.

    Where the program has one already, as Ray Train's workers do, this is another group of the same
    ranks, with the engine's own timeout.
    """

    def __init__(
        self,
        backend: str,
        store_address: tuple[str, int],
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device | None = None,
        start_timeout_s: float | None = None,
    ) -> None:
        """Meet the other ranks.

        Args:
            backend: name of torch's backend, `gloo` or `nccl`.
            store_address: host and port of the key-value store, see `meet_at`.
            rank: rank of this process.
            size: number of processes.
            timeout_s: seconds to wait for other ranks.
            device: device on which this rank's tensors lie; host memory by default.
            start_timeout_s: seconds to wait until rank 0 is there, if not `timeout_s`.
        """
        super().__init__(backend, device)
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._subgroups: list[Any] = []
        if backend == "gloo":
            check_interfaces()
        self._is_default = not dist.is_initialized()
        if self._is_default:
            self._meet(*store_address, start_timeout_s)
            self.group = dist.group.WORLD
        else:
            self.group = self._beside_default()
        self.call_group = self.call_ring.start(rank, size)

    def _meet(self, host: str, port: int, start_timeout_s: float | None) -> None:
        """Make the default group."""
        timeout = timedelta(seconds=self._timeout_s)
        first = timeout if start_timeout_s is None else timedelta(seconds=start_timeout_s)
        store = meet_at(host, port, self.rank, self.size, first)
        store.set_timeout(timeout)
        # A script may train twice: the second group must not meet the keys of the first.
        number = store.add(f"lockstep/groups/{self.rank}", 1)
        dist.init_process_group(
            self.name,
            store=PrefixStore(f"lockstep/{number}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
        )

    def _beside_default(self) -> Any:
        """A group of the ranks of the default one, which the program has made.

        Raises:
            EnvironError: those are not the ranks that the environment variables say.
        """
        there = dist.get_rank(), dist.get_world_size()
        if there != (self.rank, self.size):
            raise alone(
                EnvironError(
                    f"RANK={self.rank}, WORLD_SIZE={self.size}: torch.distributed was initialised "
                    f"as rank {there[0]} of {there[1]}; set both to the same, or destroy its group"
                )
            )
        return dist.new_group(backend=self.name, timeout=timedelta(seconds=self._timeout_s))

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.traffic.add(0, 0)
        dist.barrier(self.group)

    @collective
    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """See `Transport.subgroup`."""
        timeout = timedelta(seconds=self._timeout_s)
        made = [dist.new_group(list(r), timeout=timeout, backend=self.name) for r in groups]
        number = next(n for n, ranks in enumerate(groups) if self.rank in ranks)
        ranks = groups[number]
        calls = self.call_ring.subgroup(ranks)
        own = Subgroup(self, made[number], ranks.index(self.rank), len(ranks), calls)
        self._subgroups.append(own.group)
        if self.name != "gloo":
            back = [dist.new_group(list(r), timeout=timeout, backend=self.name) for r in groups]
            own.back = back[number]
            self._subgroups.append(own.back)
        return own

    def is_damaged(self) -> bool:
        """Always: these backends do not distinguish a lost rank from other errors."""
        return True

    def close(self) -> None:
        """Destroy the group: gloo's threads can crash a process that exits without that."""
        groups, self.group = [*self._subgroups, self.group], None
        if self._is_default:
            dist.destroy_process_group()  # all that there are
            return
        for group in groups:
            dist.destroy_process_group(group)


def _in_a_row(tensor: Tensor, counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Parts of a tensor one behind the other: where they lie so, the tensor's own memory."""
    expected = offsets(counts)
    begin = next((o for o, n in zip(starts, counts, strict=True) if n), 0)
    if all(o == begin + e for o, e, n in zip(starts, expected, counts, strict=True) if n):
        return tensor[begin : begin + sum(counts)]
    return torch.cat([tensor[o : o + n] for o, n in zip(starts, counts, strict=True)])
