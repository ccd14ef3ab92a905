"""The MPI library, initialised, and tensors as it takes them.

Where ranks may be lost, MPI must be imported from here.

With a rank lost, Open MPI's `MPI_Finalize` may wait for it for good (measured with 5.0.11), and
mpi4py calls it at exit. So whether to call it is decided here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import mpi4py
from torch import Tensor

from lockstep.comm.mpi import without_hierarchy

os.environ |= without_hierarchy(os.environ)
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

__all__ = [
    "DATATYPES", "MPI", "Messages", "begin", "exchange", "has_fault_tolerance", "mpi_buffer",
    "note_loss", "trade",
]  # fmt: skip

_is_damaged = False

_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Variable that `mpirun --with-ft ulfm` sets for its ranks."""


def has_fault_tolerance() -> bool:
    """Whether survivors of a dead rank get an error: `mpirun --with-ft ulfm` of Open MPI 5."""
    if os.environ.get(_FT_VARIABLE, "").lower() not in ("1", "true"):
        return False
    try:
        MPI.COMM_WORLD.Get_failed().Free()
    except (NotImplementedError, MPI.Exception):
        return False
    return True


def note_loss() -> None:
    """Remember that a communicator is damaged: `MPI_Finalize` is then never called.

    A rank whose communicator was revoked by another one may not know of any death itself.
    """
    global _is_damaged
    _is_damaged = True


def _finalize() -> None:
    if MPI.Is_finalized() or _is_damaged:
        return
    if not (has_fault_tolerance() and MPI.COMM_WORLD.Get_failed().size):
        MPI.Finalize()


atexit.register(_finalize)


# Data is moved, never summed, by MPI: so any datatype of the same size serves, also for bfloat16,
# which MPI does not have.
DATATYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}
"""By bytes of an element."""


def mpi_buffer(tensor: Tensor) -> MPI.buffer:
    """The memory of a tensor for MPI, whose owner it leaves as it was.

    A tensor that was given to numpy can no longer give back its memory (`FlatTensors.close`).
    """
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


_POLL_S = 0.0005
"""How often MPI is called in the background: each time costs some microseconds, and the system has
buffers for what a network of 10 Gbit/s moves meanwhile."""

_TAG = 1
"""Of these messages: those of `Transport.send` have another."""


def exchange(
    comm: MPI.Intracomm,
    is_damaged: Callable[[], bool],
    send: Tensor,
    send_counts: Sequence[int],
    send_offsets: Sequence[int],
    recv: Tensor,
    recv_counts: Sequence[int],
    recv_offsets: Sequence[int],
) -> None:
    """Send a part of a tensor to each other rank, and receive one: see `Transport.all_to_all`.

    All ranks of the group call this, with counts of 0 where there is nothing to be said. It
    is no barrier: a rank waits for those only that it sends to or receives from.

    Open MPI's collectives receive before they send. Over TCP a receiver asks for the body of a
    large message on the connection that its own messages leave by; if one of these goes first, the
    request waits behind all of it, and two ranks take turns. Measured with 5.0.11, 2.25 MB each way
    through 100 Mbit/s: 0.4 s in half of the calls; always 0.2 s if they send first.

    Raises:
        mpi4py.MPI.Exception: a rank was lost. Nothing is written into `recv` afterwards.
    """
    begin(comm, is_damaged, send, send_counts, send_offsets, recv, recv_counts, recv_offsets).wait()


def begin(
    comm: MPI.Intracomm,
    is_damaged: Callable[[], bool],
    send: Tensor,
    send_counts: Sequence[int],
    send_offsets: Sequence[int],
    recv: Tensor,
    recv_counts: Sequence[int],
    recv_offsets: Sequence[int],
) -> Messages:
    """Begin an `exchange`."""
    kind, size = DATATYPES[send.itemsize], send.itemsize
    outgoing, incoming = mpi_buffer(send), mpi_buffer(recv)
    others = [(comm.rank + n) % comm.size for n in range(1, comm.size)]

    def requests() -> Iterator[MPI.Request]:
        for rank in others:
            if count := send_counts[rank]:
                part = outgoing[send_offsets[rank] * size :][: count * size]
                yield comm.Isend([part, kind], rank, _TAG)
        for rank in reversed(others):
            if count := recv_counts[rank]:
                part = incoming[recv_offsets[rank] * size :][: count * size]
                yield comm.Irecv([part, kind], rank, _TAG)

    return Messages(comm, is_damaged, requests(), (send, recv))


def trade(
    comm: MPI.Intracomm,
    is_damaged: Callable[[], bool],
    given: Sequence[tuple[Tensor, int]],
    taken: Sequence[tuple[Tensor, int]],
) -> None:
    """Send tensors, and fill others with what comes; each with the rank it goes to or is of.

    Raises:
        mpi4py.MPI.Exception: see `exchange`.
    """

    def requests() -> Iterator[MPI.Request]:
        for tensor, to in given:
            yield comm.Isend([mpi_buffer(tensor), DATATYPES[tensor.itemsize]], to, _TAG)
        for tensor, source in taken:
            yield comm.Irecv([mpi_buffer(tensor), DATATYPES[tensor.itemsize]], source, _TAG)

    tensors = [tensor for tensor, _ in (*given, *taken)]
    Messages(comm, is_damaged, requests(), tensors).wait()


class Messages:
    """Messages under way.

    MPI moves large ones only while it is called, so in the background a thread has to call it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        is_damaged: Callable[[], bool],
        begun: Iterator[MPI.Request],
        tensors: Sequence[Tensor],
    ) -> None:
        """Begin.

        Args:
            comm: communicator that they are sent in.
            is_damaged: function to whether it has lost a rank, or was given up.
            begun: begins one message after another.
            tensors: their memory, of which MPI has addresses only.
        """
        self._comm, self._is_damaged, self._tensors = comm, is_damaged, tensors
        self._requests: list[MPI.Request] = []
        self._thread: threading.Thread | None = None
        self._error: MPI.Exception | None = None
        try:
            for request in begun:
                self._requests.append(request)
        except MPI.Exception:
            self.give_up()
            raise

    def move(self) -> None:
        """Have them move in the background until `wait`."""
        self._is_awaited = threading.Event()
        self._thread = threading.Thread(target=self._drive, name="mpi-messages", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        while not self._is_awaited.wait(_POLL_S):
            try:
                if MPI.Request.Testall(self._requests):
                    return
            except MPI.Exception as error:  # is for those who wait
                self._error = error
                return

    def _return_to_caller(self) -> None:
        """Have no other thread test the requests, which MPI forbids."""
        if self._thread is not None:
            self._is_awaited.set()
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return when all have been sent and have arrived.

        Raises:
            mpi4py.MPI.Exception: see `exchange`.
        """
        self._return_to_caller()
        try:
            if self._error is not None:
                raise self._error
            for request in self._requests:
                request.Wait()
        except MPI.Exception:
            self.give_up()
            raise

    def give_up(self) -> None:
        """If the group is damaged, have them fail, so that nothing is written any more."""
        self._return_to_caller()
        if self._is_damaged():
            _end(self._comm, self._requests)


def _end(comm: MPI.Intracomm, requests: Sequence[MPI.Request]) -> None:
    """Make pending messages fail, here and on all other ranks, and wait until they have."""
    with contextlib.suppress(MPI.Exception):
        comm.Revoke()
    for request in requests:
        with contextlib.suppress(MPI.Exception):
            request.Wait()
