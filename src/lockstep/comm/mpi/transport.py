"""The engine's bytes over MPI, straight from tensor memory; survivors of a dead rank regroup.

Lost ranks may be replaced: rank 0 has new processes started, one at a time, while all ranks train.
Importing this module initialises MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lockstep.comm.ahead import FEW_RANKS, AheadTransport
from lockstep.comm.calls import CallGroup
from lockstep.comm.mpi.growth import Growth, Joiner, agreed, join, shrunk_to_living, take_in, whole
from lockstep.comm.mpi.library import (
    DATATYPES,
    MPI,
    Messages,
    begin,
    exchange,
    has_fault_tolerance,
    mpi_buffer,
    trade,
)
from lockstep.comm.transport import (
    GroupBroken,
    LocalTransport,
    Sending,
    Transport,
    collective,
    count_broadcast,
    offsets,
)
from lockstep.errors import RankFailure

_TAG = 0
"""Of messages from one rank to another; `exchange` has its own."""

_SMALL_BYTES = 65_536
"""Of a rank, in an all-gather that is left to MPI: so much is sent without being asked for."""


class MpiTransport(AheadTransport):
    """A duplicate of `MPI.COMM_WORLD`; tensors lie in host memory.

    Args:
        growth: number of ranks that may be replaced, and their command; None replaces none.

    Attributes:
        comm: communicator of the present group.

    Raises:
        RankFailure: a process has died before all had met.
        GroupBroken: from any method, when MPI reports that a process of the group has died.
        mpi4py.MPI.Exception: another error of MPI.
    """

    name = "mpi"
    failures = (MPI.Exception,)
    _last: MPI.Intracomm | None = None
    """The group of the process's training before: the next one begins with its survivors."""

    def __init__(self, growth: Growth | None = None) -> None:
        super().__init__()
        self.can_regroup = has_fault_tolerance()
        self._growth = growth
        self._joiner: Joiner | None = None
        self._num_started = self._num_taken = 0
        self._subgroups: list[Subgroup] = []
        self._is_alone = growth is not None and growth.joins
        self._adopt(MPI.COMM_SELF.Dup() if self._is_alone else self._living())
        self._restart_calls()

    def _adopt(self, comm: MPI.Intracomm) -> None:
        # Errors must come back as exceptions: by default, MPI ends all ranks.
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._mailbox = None  # a mailbox is that of one group
        self._has_agreed = False
        self.rank = comm.rank
        self.size = comm.size

    def _restart_calls(self) -> None:
        """Count calls from the first on, as all ranks of the new group do."""
        self.call_group = self.call_ring.start(self.rank, self.size)

    def _living(self) -> MPI.Intracomm:
        """A group of those that an earlier training of the same script has left, else of all."""
        last, MpiTransport._last = MpiTransport._last, None
        if last is None:
            try:
                return MPI.COMM_WORLD.Dup()
            except MPI.Exception as error:
                raise RankFailure(
                    f"a rank has died before all had met ({error}); start the run again"
                ) from None
        living = whole(shrunk_to_living(last)) if self.can_regroup else last.Dup()
        if living.size == last.size:  # where ranks are lost, MPI may wait for them
            last.Free()
        return living

    @collective
    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """See `Transport.all_gather`."""
        if self._gathers(own, out, counts):
            return
        starts = offsets(counts)
        mine = out[starts[self.rank] :][: counts[self.rank]]
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        num_own, size = counts[self.rank], out.itemsize
        if self.size > FEW_RANKS:
            self.traffic.add(num_own * (self.size - 1) * size, (out.numel() - num_own) * size)
            self._gather(out, range(self.size), counts)
            return
        if min(counts) == max(counts) and num_own * size <= _SMALL_BYTES:
            # The call of a small step: what is counted here costs a fifth of a microsecond.
            memory = mpi_buffer(out)
            moved = memory.nbytes // self.size * (self.size - 1)
            traffic = self.traffic
            traffic.num_calls += 1
            traffic.sent_bytes += moved
            traffic.received_bytes += moved
            # In place: MPI does not allow a send buffer inside the receive buffer.
            self.comm.Allgather(MPI.IN_PLACE, [memory, DATATYPES[size]])
            return
        self.traffic.add(num_own * (self.size - 1) * size, (out.numel() - num_own) * size)
        # Not Allgatherv: once Open MPI 5 knows of a loss, it moves nothing and says all is well.
        sent = [num_own] * self.size
        exchange(self.comm, self.is_damaged, mine, sent, [0] * self.size, out, counts, starts)

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
        starts = offsets(recv_counts)
        own, there, here = send_counts[self.rank], send_offsets[self.rank], starts[self.rank]
        recv[here : here + own] = send[there : there + own]
        num_sent = sum(send_counts) - own
        self.traffic.add(num_sent * send.itemsize, (recv.numel() - own) * recv.itemsize)
        exchange(
            self.comm, self.is_damaged, send, send_counts, send_offsets, recv, recv_counts, starts
        )

    def _trade(
        self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]
    ) -> None:
        trade(self.comm, self.is_damaged, given, taken)

    def runs_ahead(self, num_bytes: int) -> bool:
        """See `Transport.runs_ahead`: a thread calls MPI meanwhile, if it may."""
        return self._is_long(num_bytes) and MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _begin(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> Messages:
        messages = begin(
            self.comm, self.is_damaged, send, send_counts, send_offsets, recv, recv_counts,
            offsets(recv_counts),
        )  # fmt: skip
        messages.move()
        return messages

    def _end(self, handle: Messages) -> None:
        handle.wait()

    @collective
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Transport.broadcast`."""
        count_broadcast(self, tensor, root)
        self.comm.Bcast([mpi_buffer(tensor), DATATYPES[tensor.itemsize]], root=root)

    @collective
    def send(self, tensor: Tensor, to: int) -> Sending:
        """See `Transport.send`."""
        self.traffic.add(tensor.numel() * tensor.itemsize, 0)
        buffer = [mpi_buffer(tensor), DATATYPES[tensor.itemsize]]
        return Sending(self, self.comm.Isend(buffer, to, _TAG), tensor)

    @collective
    def finish_sending(self, handle: MPI.Request) -> None:
        """See `Transport.finish_sending`."""
        handle.Wait()

    @collective
    def receive(self, tensor: Tensor, source: int) -> None:
        """See `Transport.receive`."""
        self.traffic.add(0, tensor.numel() * tensor.itemsize)
        self.comm.Recv([mpi_buffer(tensor), DATATYPES[tensor.itemsize]], source, _TAG)

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.traffic.add(0, 0)
        self.comm.Barrier()

    @collective
    def agree(self) -> None:
        """See `Transport.agree`."""
        self.traffic.add(0, 0)
        if not self.can_regroup:
            self.comm.Barrier()
            return
        # Agreement goes on over a revoked communicator, so ranks that regroup take part in it too.
        self._has_agreed = True
        if not self.comm.Agree(1):
            raise GroupBroken("another rank has noticed a loss")
        self._has_agreed = False

    @collective
    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """See `Transport.subgroup`."""
        number = next(n for n, ranks in enumerate(groups) if self.rank in ranks)
        calls = self.call_ring.subgroup(groups[number])
        part: MPI.Intracomm | None = None
        try:
            made = self.comm.Split(number, groups[number].index(self.rank))
            assert isinstance(made, MPI.Intracomm)
            part = made
        except MPI.Exception:
            # Others may have theirs, and would wait for this rank there.
            if not self.can_regroup:
                raise
        if self.can_regroup and not agreed(self.comm, part is not None):
            raise GroupBroken("a rank was lost while subgroups were made")
        assert part is not None
        if part.size == 1:
            part.Free()
            return LocalTransport()
        self._subgroups.append(Subgroup(self, part, calls))
        return self._subgroups[-1]

    @collective
    def regroup(self, takes_in: bool = False) -> None:
        """See `Transport.regroup`."""
        for part in self._subgroups:  # somebody may wait in one of them
            part.give_up()
        self._subgroups.clear()
        if self._is_alone:
            joined, self._num_taken = join()
            self._adopt(whole(joined))
            self._is_alone = False
            self._restart_calls()
            return
        before = self.comm
        before.Revoke()  # or survivors that have noticed nothing stay blocked in a collective
        # Others may wait in `agree`: this rank's 0 makes it fail on all of them alike. A rank that
        # took part already must not do so a second time: no other rank would answer.
        if not self._has_agreed:
            with contextlib.suppress(MPI.Exception):
                before.Agree(0)
        # The old communicator is not freed: messages of what was interrupted may still be under
        # way, and Open MPI gives the number they carry to another one when this one is gone.
        shrunk = whole(shrunk_to_living(before))
        if self._growth is not None and takes_in:
            shrunk = self._grow(shrunk, self._growth)
        self._adopt(shrunk)
        self._restart_calls()

    def _grow(self, comm: MPI.Intracomm, growth: Growth) -> MPI.Intracomm:
        """Let the joining rank join, if there is one, and start the next one."""
        is_ready = np.array([self.has_joiner])  # rank 0 alone has one
        # A broadcast may succeed on some ranks and fail on others; all must take the same way on.
        is_broadcast = True
        try:
            comm.Bcast(is_ready)
        except MPI.Exception:
            comm.Revoke()
            is_broadcast = False
        if not agreed(comm, is_broadcast):
            return self._grow(whole(shrunk_to_living(comm)), growth)
        if is_ready[0]:
            merged = take_in(comm, self._joiner, self._num_taken)
            self._joiner = None
            self._num_taken += 1
            comm = whole(shrunk_to_living(comm) if merged is None else merged)
        if self._joiner is not None and self._joiner.has_failed:
            self._joiner = None
        # A new rank 0 has started none itself; it knows only how many have joined.
        started = max(self._num_started, self._num_taken)
        is_wanted = comm.size < growth.size and started < growth.most and self._joiner is None
        if comm.rank == 0 and is_wanted:
            self._num_started = started + 1
            self._joiner = Joiner(growth.argv(self._num_taken))
        return comm

    @property
    def is_joining(self) -> bool:
        """See `Transport.is_joining`."""
        return self._is_alone

    @property
    def has_joiner(self) -> bool:
        """See `Transport.has_joiner`."""
        is_wanted = self._growth is not None
        return is_wanted and self._joiner is not None and self._joiner.is_ready

    def stop_growing(self) -> None:
        """See `Transport.stop_growing`."""
        self._growth = None

    def _look(self) -> None:
        """Raise an exception if the ranks waited for will not come."""
        self.comm.Iprobe()  # drives MPI, which notices a loss only while it is called
        if self.is_damaged():
            raise GroupBroken("a rank has died, or has given the group up")

    def is_damaged(self) -> bool:
        """Whether a rank of the group is known to have died, or the group was given up."""
        if not self.can_regroup:
            return False
        return self.comm.Is_revoked() or self.comm.Get_failed().size > 0

    def close(self) -> None:
        """Leave the group; the next one of this process is made of those in it."""
        if self._joiner is not None:
            self._joiner.dismiss()
        MpiTransport._last = self.comm

    def abort(self, exit_code: int) -> None:
        """End all ranks of the job: the others may wait for this one for ever."""
        MPI.COMM_WORLD.Abort(exit_code)


class Subgroup(MpiTransport):
    """Some ranks of a group, see `Transport.subgroup`."""

    def __init__(self, whole: MpiTransport, comm: MPI.Intracomm, calls: CallGroup) -> None:
        """Use a communicator that was made for it, and the group that its calls are counted in."""
        AheadTransport.__init__(self)
        self._join_records(whole, calls)
        self.can_regroup = whole.can_regroup
        self._growth = None
        self._joiner = None
        self._adopt(comm)

    def give_up(self) -> None:
        """See `Transport.give_up`."""
        if self.can_regroup:
            self.comm.Revoke()
            for started in list(self.under_way):
                started.handle.give_up()
                started.end()

    def close(self) -> None:
        """Nothing to do: what is interrupted may still be under way in it."""


class BorrowedComm(MpiTransport):
    """A copy of a communicator that a program has made itself; a lost rank ends it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Copy the communicator; all its ranks call this."""
        AheadTransport.__init__(self)
        self._growth = None
        self._joiner = None
        self._subgroups = []
        self._adopt(comm.Dup())

    def close(self) -> None:
        """Free the copy."""
        self.comm.Free()
