"""What a process group of the `mpi4py` backend is, apart from its operations.

torch knows two kinds of process group: its own, which looks up a C++ backend per device, and
one written in Python, which replaces it. `MpiGroup` is of the second kind and answers the
questions about backends that torch asks of the first.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from lockstep.comm.backend.buffers import on_current_stream
from lockstep.comm.backend.work import MpiWork, SourcedWork
from lockstep.comm.backend.world import MAX_TAG, MpiWorld
from lockstep.comm.mpi.library import MPI

BACKEND_NAME = "mpi4py"

_MIN_SWEEP = 64


class MpiGroup(dist.ProcessGroup):
    """A communicator with a name, and the operations running on it.

    Args:
        world: the family of communicators that `comm` belongs to.
        comm: communicator of exactly the group's ranks, in order; the group gives it back when shut
            down.
        name: torch's name of the group.
        store: store shared by the group's ranks.
        timeout: time limit of operations that have none of their own.
    """

    # What torch asks of the backends inside a group; this group is its own backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        world: MpiWorld,
        comm: MPI.Intracomm,
        name: str,
        store: Store,
        timeout: timedelta,
    ) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.world = world
        self.comm: MPI.Comm = comm
        self._num_ranks = comm.size
        self._name = name
        self._desc = "undefined"
        self._store = store
        self._timeout_s = timeout.total_seconds()
        # Until they are done, MPI uses the memory of operations that the caller has forgotten.
        self._running: set[MpiWork] = set()
        self._sweep_at = _MIN_SWEEP
        self._coalescing: list[MpiWork] | None = None

    # Names, as DeviceMesh, functional collectives and DDP ask for them.

    def getBackendName(self) -> str:
        """The name the backend is registered under."""
        return BACKEND_NAME

    def name(self) -> str:
        """The name the backend is registered under."""
        return BACKEND_NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_name(self) -> Any:
        """Torch's name of the group, unique in the process."""
        return self._name

    def getGroupName(self) -> str:
        """Torch's name of the group, as its C++ side asks for it."""
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    @property
    def group_desc(self) -> str:
        """The description of the group that its maker gave."""
        return self._desc

    def getGroupDesc(self) -> str:
        """The description of the group, as torch's C++ side asks for it."""
        return self._desc

    # The answers of a backend, as FSDP2, checkpointing and object collectives ask for them.

    @property
    def _device_types(self) -> list[torch.device]:
        staged = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *staged]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in {known.type for known in self._device_types}:
            raise RuntimeError(f"the mpi4py backend does not move tensors on {device.type}")
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the backend wants to allocate tensors itself: no."""
        return False

    def get_group_store(self) -> Store:
        """The store shared by the group's ranks."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations started from now on may take."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Operations.

    def launch(
        self,
        operation: str,
        test: Callable[[], bool],
        result: Sequence[Any],
        *,
        opts: Any = None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        source: Callable[[], int] | None = None,
    ) -> MpiWork:
        """The `Work` of an operation that has just been started.

        Args:
            operation: name of the operation, for messages.
            test: function that returns, without blocking, whether it is done.
            result: tensors that it fills.
            opts: torch's options of the operation, which may hold a timeout.
            finish: function to call once when it is done.
            keep: memory that MPI reads from or writes to.
            source: function that returns the rank that a received message came from.
        """
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else -1.0
        kwargs: dict[str, Any] = {
            "describe": lambda: self.describe(operation),
            "timeout_s": seconds if seconds > 0 else self._timeout_s,
            "progress": self.world.progress,
            "finish": finish,
            "keep": keep,
            "on_done": self._running.discard,
        }
        work = (
            MpiWork(test, result, **kwargs)
            if source is None
            else SourcedWork(source, test, result, **kwargs)
        )
        self._running.add(work)
        if len(self._running) >= self._sweep_at:
            self._sweep()
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def started(
        self,
        operation: str,
        request: MPI.Request,
        result: Sequence[Any],
        tensor: Tensor,
        opts: Any = None,
        finish: Any = None,
        keep: Tensor | None = None,
    ) -> MpiWork:
        """Launch a started request; `finish` runs on the device of `tensor`."""
        if finish is not None:
            finish = on_current_stream(finish, tensor.device)
        return self.launch(
            operation, request.Test, result, opts=opts, finish=finish, keep=(keep, tensor)
        )

    def together(self, operation: str, works: Sequence[MpiWork], result: Sequence[Any]) -> MpiWork:
        """One `Work` that is done when all of `works` are, and fails if any did."""

        def finish() -> None:
            for work in works:
                work.wait()

        return self.launch(operation, lambda: _all_done(works), result, finish=finish)

    def describe(self, operation: str) -> str:
        """An operation of this group, for messages."""
        return (
            f"{operation} on group '{self._name}' ({self._desc}), "
            f"rank {self.rank()} of {self._num_ranks},"
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        works, self._coalescing = self._coalescing or [], None
        return self.together("coalesced operations", works, [])

    def _sweep(self) -> None:
        """Release what is done but was never waited for."""
        for work in list(self._running):
            work.is_completed()
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._running))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the ranks that are missing.

        `torch.distributed.monitored_barrier` serves gloo only, so call this on the group.

        Args:
            timeout: time to wait; None for the group's own limit.
            wait_all_ranks: whether to name all missing ranks rather than the first.

        Raises:
            TimeoutError: a rank did not come; on rank 0 the message names it.
            mpi4py.MPI.Exception: MPI reported an error.
        """
        limit_s = timeout.total_seconds() if timeout else self._timeout_s
        others = range(1, self._num_ranks)
        if self.rank() != 0:
            self.comm.Isend([None, 0, MPI.BYTE], 0, MAX_TAG)
            late = _late({0: self.comm.Irecv([None, 0, MPI.BYTE], 0, MAX_TAG)}, limit_s)
        else:
            empty = [None, 0, MPI.BYTE]
            late = _late({rank: self.comm.Irecv(empty, rank, MAX_TAG) for rank in others}, limit_s)
        if late:
            named = late if wait_all_ranks else late[:1]
            raise TimeoutError(
                f"{self.describe('monitored_barrier')} heard nothing from "
                f"rank {', '.join(map(str, named))} within {limit_s:g} s"
            )
        if self.rank() == 0:
            for rank in others:
                self.comm.Isend([None, 0, MPI.BYTE], rank, MAX_TAG)

    # The end.

    def shutdown(self) -> None:
        """Give the communicator back. Called by `destroy_process_group`; idempotent."""
        if self.comm == MPI.COMM_NULL:
            return
        self._sweep()
        if self._running:
            # MPI may still write into the memory of these, so it must outlive this group.
            atexit.register(len, self._running)
        comm, self.comm = self.comm, MPI.COMM_NULL
        self.world.free(comm)

    def abort(self) -> None:
        """Make all running operations fail, on all ranks where MPI can, and shut down."""
        if self.comm != MPI.COMM_NULL:
            with contextlib.suppress(NotImplementedError, MPI.Exception):
                self.comm.Revoke()
        self.shutdown()


def _all_done(works: Sequence[MpiWork]) -> bool:
    # A list, so that each one gets its turn.
    return all([work.is_completed() for work in works])  # noqa: C419


def _late(requests: dict[int, MPI.Request], limit_s: float) -> list[int]:
    """The ranks whose zero-byte message has not come in time, lowest first."""
    deadline = time.monotonic() + limit_s
    while requests and time.monotonic() <= deadline:
        requests = {rank: request for rank, request in requests.items() if not request.Test()}
    for request in requests.values():
        request.Cancel()
    return sorted(requests)
