"""A backend of torch.distributed for `hostgpu` that behaves as NCCL does, over gloo.

It takes tensors of the device only. Operations of a group, and messages between two ranks, are done
one after the other, each at once with the other end's; `wait` returns at once and lets the device's
stream wait; and `abort` ends what is under way as if all were well.

Memory that an operation of NCCL has used is free after `wait`, in the order of the stream; here it
is when the operation has ended. With HOSTCCL_BLOCKS=1 in the environment `wait` returns no sooner,
so that the most memory of a step is what it would be.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import _hostgpu as extension
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.comm.torchdist.store import LOOPBACK
from lockstep.comm.torchdist.waiting import Connections

_BLOCKS = os.environ.get("HOSTCCL_BLOCKS") == "1"


class HostWork:
    """An operation under way."""

    def __init__(self) -> None:
        self._lock, self._ended, self._is_waited = threading.Lock(), threading.Event(), False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let what the device is given from now on wait for this."""
        if _BLOCKS:
            self._ended.wait()
        with self._lock:
            if not self._ended.is_set() and not self._is_waited:
                self._is_waited = True
                extension.hold()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def end(self) -> None:
        """Note that it has ended."""
        with self._lock:
            self._ended.set()
            if self._is_waited:
                extension.release()

    def join(self) -> None:
        """Return when it has ended, if the stream waits for it."""
        if self._is_waited:
            self._ended.wait()


class HostcclGroup(dist.ProcessGroup):
    """Ranks that meet in a store, and connect when they are told to or first need it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._gloo: Any = None
        self._connections = Connections(LOOPBACK)
        self._queues: dict[object, queue.Queue[Any]] = {}
        self._under_way: list[HostWork] = []
        self._aborted, self._name = threading.Event(), ""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Connect now."""
        if self._gloo is None:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            options._timeout = self._timeout
            self._connections.begin()
            self._gloo = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
            self._connections.end()

    def abort(self) -> None:
        """End what is under way on this rank; on others it goes on waiting."""
        self._aborted.set()
        self._connections.shut_down()

    shutdown = abort

    def _allgather_base(self, out: Tensor, own: Tensor, *_: Any) -> HostWork:
        return self._start("all", [out, own], lambda o, i: self._gloo._allgather_base(o, i))

    def alltoall_base(
        self, out: Tensor, own: Tensor, counts: Sequence[int], sent: Sequence[int], *_: Any
    ) -> HostWork:
        call = self._start
        return call("all", [out, own], lambda o, i: self._gloo.alltoall_base(o, i, counts, sent))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> HostWork:
        """See torch."""
        return self._start("all", tensors, lambda t: self._gloo.broadcast([t], options))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> HostWork:
        """See torch."""
        return self._start(to, tensors, lambda t: self._gloo.send([t], to, tag))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> HostWork:
        """See torch."""
        return self._start(source, tensors, lambda t: self._gloo.recv([t], source, tag))

    def barrier(self, *_: Any, **__: Any) -> HostWork:
        """See torch."""
        one = torch.zeros(1, device=torch.accelerator.current_accelerator())
        work = self._start("all", [one], lambda t: self._gloo.allreduce([t]))
        work.wait()
        torch.accelerator.synchronize()
        return work

    def _start(self, key: object, tensors: Sequence[Tensor], call: Callable[..., Any]) -> HostWork:
        for tensor in tensors:
            if tensor.device.type != "hostgpu":
                raise RuntimeError(f"No backend type associated with device type {tensor.device}")
        self.eager_connect_single_device()
        if key not in self._queues:
            self._queues[key] = queue.Queue()
            threading.Thread(target=self._do, args=(self._queues[key],), daemon=True).start()
        before = [work for work in self._under_way if not work.is_completed()]
        work = HostWork()
        self._under_way = [*before, work]
        views = [torch.ops.hostgpu.host_view(tensor.detach()) for tensor in tensors]
        self._queues[key].put((work, before, views, call))
        return work

    def _do(self, tasks: queue.Queue[Any]) -> None:
        while True:
            work, before, views, call = tasks.get()
            for other in before:
                other.join()
            memory = [StorageWeakRef(v.untyped_storage()) for v in views] if _BLOCKS else []
            if not self._aborted.is_set():
                try:
                    call(*views).wait()
                except Exception:  # a kernel of NCCL goes on waiting for what will not come
                    self._aborted.wait()
            del views, call  # before the host goes on, which then has their memory
            while not (self._aborted.is_set() or all(storage.expired() for storage in memory)):
                time.sleep(1e-4)  # a thread of gloo still has them
            work.end()  # after an abort as if all were well: who reads the result has to ask

    # What torch asks of a group.

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "hostccl"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        """Torch's description of it."""


def create_group(options: Any, _: Any) -> HostcclGroup:
    """Make a group, as `torch.distributed.Backend.register_backend` wants it."""
    return HostcclGroup(options.store, options.group_rank, options.group_size, options.timeout)
