"""New processes for an MPI group, merged between two steps, and groups of those left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lockstep.comm.mpi.library import MPI, note_loss

_TAG = 20_411
_POLL_S = 0.005
_MERGE_S = 30.0
_START_S = 30.0

Comm = MPI.Intracomm
_Comm = TypeVar("_Comm", bound=MPI.Comm)


@dataclass(frozen=True)
class Growth:
    """The replacement of lost ranks.

    Attributes:
        size: number of ranks to come back to.
        most: greatest number of joining ranks.
        argv: function from the number of a joining rank, from 0, to its program and arguments.
        joins: whether this process is a joining rank itself.
    """

    size: int
    most: int
    argv: Callable[[int], Sequence[str]]
    joins: bool = False


class Joiner:
    """A process that rank 0 has started and that waits to join.

    `MPI_Comm_spawn` returns when the new process has called `MPI_Init`, so a thread calls it.

    Args:
        argv: program and arguments to run.

    Attributes:
        is_ready: whether it can join now.
        has_failed: whether it could not be started.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.is_ready = self.has_failed = False
        self._between: MPI.Intercomm | None = None
        self._thread = threading.Thread(target=self._start, args=(argv,), daemon=True)
        self._thread.start()

    def _start(self, argv: Sequence[str]) -> None:
        try:
            between = _raising(MPI.COMM_SELF.Spawn(argv[0], list(argv[1:]), maxprocs=1))
            _receive(between)
        except MPI.Exception:
            self.has_failed = True
            return
        self._between = between
        self.is_ready = True

    def invite(self, num_taken: int) -> Comm:
        """Tell it to join, and make a group of this process and the new one, in this order.

        Args:
            num_taken: number of ranks that have joined the group before.

        Raises:
            mpi4py.MPI.Exception: it has died.
        """
        assert self._between is not None
        _send(self._between, num_taken)
        return _raising(self._between.Merge(high=False))

    def dismiss(self) -> None:
        """Tell the process that it will not join, so that it ends."""
        self._thread.join(_START_S)
        if self._between is not None:
            with contextlib.suppress(MPI.Exception):
                _send(self._between, -1)


def take_in(comm: Comm, joiner: Joiner | None, num_taken: int) -> Comm | None:
    """A group of all ranks of `comm` and, behind them, the joining rank of rank 0; collective.

    Args:
        comm: communicator of the ranks there are.
        joiner: process that joins, on rank 0; None on the other ranks.
        num_taken: number of ranks that have joined the group before.

    Returns:
        None on all ranks if it has failed on one of them; `comm` may then be revoked.
    """
    pair = between = merged = None
    try:
        pair = joiner.invite(num_taken) if joiner else None
        leader = 1 if joiner else 0
        between = _raising(comm.Create_intercomm(0, pair or MPI.COMM_SELF, leader, _TAG))
        merged = _raising(between.Merge(high=False))
    except MPI.Exception:
        for other in (comm, pair, between):  # another rank may wait in one of them
            if other is not None:
                other.Revoke()
    if agreed(comm, merged is not None):
        return merged
    if merged is not None:
        merged.Revoke()
    return None


def agreed(comm: Comm, is_well: bool = True) -> bool:
    """Whether `is_well` on all ranks and none of them has died: the same on all survivors."""
    try:
        return bool(comm.Agree(int(is_well)))
    except MPI.Exception:
        return False


def join() -> tuple[Comm, int]:
    """A joining rank's side of `take_in`; returns when it is invited.

    The process kills itself, and so counts as a lost rank, when it can no longer join.

    Returns:
        The group, and how many ranks have joined it, this one included.
    """
    note_loss()  # in another world than this process's own
    parent = _raising(MPI.Comm.Get_parent())
    try:
        _send(parent, 0)
        num_taken = _receive(parent)
        if num_taken < 0:
            _vanish()
        late = threading.Timer(_MERGE_S, _vanish)
        late.daemon = True
        late.start()
        pair = _raising(parent.Merge(high=True))
        between = _raising(MPI.COMM_SELF.Create_intercomm(0, pair, 0, _TAG))
        merged = _raising(between.Merge(high=True))
        late.cancel()
    except MPI.Exception:
        _vanish()
    return merged, num_taken + 1


def _raising(comm: _Comm) -> _Comm:
    """A communicator whose errors are raised as exceptions: by default, MPI ends all ranks."""
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def _send(between: MPI.Intercomm, value: int) -> None:
    between.Send(np.array([value]), dest=0, tag=_TAG)


def _receive(between: MPI.Intercomm) -> int:
    """A number from the other side; waits without keeping a core busy."""
    while not between.Iprobe(source=0, tag=_TAG):
        time.sleep(_POLL_S)
    value = np.zeros(1, dtype=np.int64)
    between.Recv(value, source=0, tag=_TAG)
    return int(value[0])


def _vanish() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shrunk_to_living(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator without those that have died."""
    shrunk = comm.Shrink()
    assert isinstance(shrunk, MPI.Intracomm)
    return shrunk


def whole(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A new communicator once it is complete everywhere, without those that died meanwhile.

    Agreement is the same on all survivors. Open MPI 5 crashes where a revocation finds a
    communicator that is not complete.
    """
    while not agreed(_raising(comm)):
        comm = shrunk_to_living(comm)
    return comm
