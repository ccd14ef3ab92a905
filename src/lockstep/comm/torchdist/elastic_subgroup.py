"""Some ranks of an elastic group, and how those who wait in a group are woken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.comm.calls import CallGroup
from lockstep.comm.torchdist.process_group_transport import GroupTransport, Subgroup
from lockstep.comm.torchdist.sockets import Connections
from lockstep.comm.torchdist.waiting import Finish, finish, finish_message

Wait = Callable[[Any, Finish, Connections], None]
"""Waits for a transfer over some connections by a function that gives up what is in vain."""


class ElasticSubgroup(Subgroup):
    """Some ranks of an `ElasticTransport`, with connections of their own, that can be given up."""

    can_regroup = True

    def __init__(
        self,
        whole: GroupTransport,
        group: Any,
        rank: int,
        size: int,
        calls: CallGroup,
        connections: Connections,
        wait: Wait,
    ) -> None:
        """Use a process group that was made for it.

        Args:
            whole: transport of all ranks.
            group: process group of the ranks of this one.
            rank: rank of this process in it.
            size: number of its ranks.
            calls: the same group, as calls are counted in it.
            connections: connections of `group`.
            wait: the way in which `whole` waits for a transfer.
        """
        super().__init__(whole, group, rank, size, calls)
        self._connections = connections
        self._wait = wait
        self._look_at_whole = whole._look

    def give_up(self) -> None:
        """See `Transport.give_up`; called by any thread."""
        cut(self.name, self.group, self._connections)

    def close(self) -> None:
        """Let the process group go, and wake whoever waits in it."""
        self._connections.shut_down()
        super().close()

    def _look(self) -> None:
        self._look_at_whole()
        if self._connections.have_closed():
            raise RuntimeError("the group was given up")

    def _finish(self, work: Any) -> None:
        self._wait(work, finish, self._connections)

    def _finish_message(self, work: Any) -> None:
        self._wait(work, finish_message, self._connections)


def cut(backend: str, group: Any, connections: Connections) -> None:
    """Have the transfers of a group fail, from any thread.

    Args:
        backend: name of torch's backend.
        group: process group; None if it was let go.
        connections: connections of the group.
    """
    if backend == "nccl" and group is not None:
        group.abort()
    else:
        connections.shut_down()
