"""The transport of one process on its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.comm.transport import Transport


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
