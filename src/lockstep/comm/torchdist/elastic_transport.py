"""The engine's bytes over gloo or NCCL, for ranks whose launcher lets survivors go on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from lockstep.comm.calls import CallGroup
from lockstep.comm.torchdist.process_group_transport import GroupTransport, Subgroup
from lockstep.comm.torchdist.store import LOOPBACK, device_group
from lockstep.comm.torchdist.supervision import GenerationLost, Supervision
from lockstep.comm.torchdist.waiting import (
    Connections,
    Finish,
    LeftBehind,
    finish,
    finish_message,
    never_destroy,
)
from lockstep.comm.transport import LocalTransport, Transport, collective

Wait = Callable[[Any, Finish, Connections], None]
"""Waits for a transfer over some connections, by a function that notices when it cannot end."""


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
        cut(self.name, [self.group, self.back], self._connections)

    def close(self) -> None:
        """Release the process group, and wake threads that wait in it."""
        self._connections.shut_down()
        for started in list(self.under_way):
            started.end()  # gloo writes nothing more when its handle is gone
        super().close()

    def _look(self) -> None:
        self._look_at_whole()
        if self._connections.are_shut or self._connections.have_closed():
            raise RuntimeError("the group was given up")

    def _finish(self, work: Any, is_message: bool = False) -> None:
        self._wait(work, finish_message if is_message else finish, self._connections)


def cut(backend: str, groups: Sequence[Any], connections: Connections) -> None:
    """Make the transfers of groups fail, from any thread.

    Args:
        backend: name of torch's backend.
        groups: process groups; None for one that was released.
        connections: connections of the groups.
    """
    connections.shut_down()  # first: what was aborted ends as if all were well
    for group in groups:
        if backend != "gloo" and group is not None:
            group.abort()


_BUILD_S = 30.0
"""Seconds that ranks may take to find each other in the store and to connect."""
_BUILD_TIME = timedelta(seconds=_BUILD_S)
_NOTICE_S = 5.0
"""Seconds that the supervisor may take to notice a loss after connections have reported it, beyond
those after which it takes a silent host to be lost."""


class ElasticTransport(GroupTransport):
    """A process group that is rebuilt, in the same processes, whenever a rank is lost.

    The launcher's supervisor sees a death and notifies the survivors. A thread in each of them then
    wakes blocked collectives: over gloo, by shutting down the group's connections, since its
    `abort` does not wake a receive from a peer that lives; over NCCL and other backends of devices,
    by `abort`. Tensors stay on the device.
    NCCL itself has never run here; tests have a backend of the same manners (`tests/accelerator`).

    Args:
        backend: name of torch's backend, `gloo` or `nccl`.
        store_address: host and port of the supervisor's store.
        supervisor_fd: file descriptor of the inherited socket to the supervisor.
        slot: lifelong number of this process.
        timeout_s: seconds that a collective may wait for others.
        device: device on which this rank's tensors lie; host memory by default.
        joins: whether this process joins ranks that began without it.
        address: address of this host that the other ranks reach.
        host_timeout_s: seconds after which the supervisor takes a silent host to be lost.
    """

    can_regroup = True

    def __init__(
        self,
        backend: str,
        store_address: tuple[str, int],
        supervisor_fd: int,
        slot: int,
        timeout_s: float,
        device: torch.device | None = None,
        joins: bool = False,
        address: str = LOOPBACK,
        host_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(backend, device)
        self._store_address = store_address
        self._address = address
        self._notice_s = host_timeout_s + _NOTICE_S
        self._slot = slot
        self._timeout_s = timeout_s
        self._connections = Connections(self._address)
        self._subgroups: list[ElasticSubgroup] = []
        self._generation = self._num_subgroups = 0
        self._left_behind: list[LeftBehind] = []
        self._builders: list[threading.Thread] = []
        self.group = None
        self._supervision = Supervision(supervisor_fd, self._cut)
        self._is_alone = joins
        if joins:
            self.rank, self.size = 0, 1
            self.group = self._new_group(HashStore(), 0, 1)
        else:
            self._join()

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self._agree()

    @collective
    def agree(self) -> None:
        """See `Transport.agree`: the supervisor decides."""
        self._agree()

    @collective
    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """See `Transport.subgroup`."""
        number = next(n for n, ranks in enumerate(groups) if self.rank in ranks)
        rank, size = groups[number].index(self.rank), len(groups[number])
        self._num_subgroups += 1
        calls = self.call_ring.subgroup(groups[number])
        if size == 1:
            self._agree()
            return LocalTransport()
        prefix = f"lockstep/{self._generation}/{self._num_subgroups}/{number}"
        connections = Connections(self._address)
        group = self._connected(prefix, rank, size, connections, [])
        made = ElasticSubgroup(self, group, rank, size, calls, connections, self._wait)
        if self.name != "gloo":
            made.back = self._connected(f"{prefix}/back", rank, size, connections, [])
        self._subgroups.append(made)
        self._agree()
        return made

    @collective
    def regroup(self, takes_in: bool = False) -> None:
        """See `Transport.regroup`."""
        self._join(takes_in)

    @property
    def is_joining(self) -> bool:
        """See `Transport.is_joining`."""
        return self._is_alone

    @property
    def has_joiner(self) -> bool:
        """See `Transport.has_joiner`."""
        # A rank that trains alone waits for nobody, so that no collective tells it of the loss
        # with which a new coordinator begins: joining ranks would wait for it for ever.
        return self._supervision.has_joiner or self._supervision.is_lost()

    def withdraw(self) -> NoReturn:
        """See `Transport.withdraw`; the supervisor replaces none that ends by itself."""
        os._exit(2)

    def stop_growing(self) -> None:
        """Nothing to do: see `withdraw`."""

    def _look(self) -> None:
        """Raise an exception if the ranks waited for will not come."""
        if self._supervision.is_lost():
            raise GenerationLost("a rank died")

    def is_damaged(self) -> bool:
        """Whether the supervisor has noticed the loss of a rank.

        Called after an error. The connections of a dead rank may report its end earlier than the
        supervisor does, so this waits for a few seconds.
        """
        return self._supervision.is_lost(self._notice_s)

    def close(self) -> None:
        """Leave the group."""
        self._supervision.leave()
        self._release().clear()
        # A thread that still waits for a rank that died would crash the exit of this process.
        for builder in self._builders:
            builder.join(_BUILD_S)

    def abort(self, exit_code: int) -> None:
        """End all ranks."""
        self._supervision.abort(exit_code)
        super().abort(exit_code)

    def _agree(self) -> None:
        self.traffic.add(0, 0)
        if not self._is_alone:
            self._supervision.agree()

    def _join(self, takes_in: bool = False) -> None:
        """Build the next generation, and the one after it should a rank die meanwhile."""
        while True:
            generation, members = self._supervision.meet(takes_in)
            try:
                self.group = self._build(generation, members)
                self._supervision.confirm()
            except GenerationLost:
                continue
            self._is_alone = False
            self.rank, self.size = members.index(self._slot), len(members)
            self.call_group = self.call_ring.start(self.rank, self.size)
            return

    def _build(self, generation: int, members: list[int]) -> Any:
        """The process group of a generation.

        Raises:
            GenerationLost: a rank was lost.
        """
        former = self._release()
        if self.name != "gloo":
            for group in former:
                if group is not None:
                    group.abort()  # frees memory of the device; all have met, so nobody is in it
        # Counted from 0 again: joining ranks have made none of the earlier ones.
        self._generation, self._num_subgroups, self._num_started = generation, 0, 0
        self._mailbox = None
        # A prefix for each generation: the keys of one that was given up stay in the store.
        rank, size = members.index(self._slot), len(members)
        return self._connected(f"lockstep/{generation}", rank, size, self._connections, former)

    def _release(self) -> list[Any]:
        """Forget the present group and its subgroups: those that may be destroyed."""
        groups = [self.group, *(g for part in self._subgroups for g in (part.group, part.back))]
        self.group = None
        for started in list(self.under_way):
            started.end()
        for part in self._subgroups:
            part.close()
        self._subgroups = []
        if any(transfer.is_stuck() for transfer in self._left_behind):
            never_destroy(groups)
        self._left_behind = []
        return groups

    def _connected(
        self, prefix: str, rank: int, size: int, connections: Connections, former: list[Any]
    ) -> Any:
        """A process group of ranks that meet in the store.

        Nothing wakes a backend that waits for a connection from a rank that has died. So a thread
        builds the group, and is abandoned if a rank is lost meanwhile.

        Args:
            prefix: beginning of the keys that these ranks use in the store.
            rank: rank of this process in the group.
            size: number of ranks of the group.
            connections: records the connections of the group.
            former: groups to be destroyed when this one is built; emptied.

        Raises:
            GenerationLost: a rank was lost.
        """
        # Gloo does not name its sockets: those opened while the group is built are its own. NCCL
        # may close some of its own at any time.
        connections.begin()
        if self.name != "gloo":
            connections.end()
        address = self._supervision.store or self._store_address
        built: list[Any] = []
        errors: list[Exception] = []

        def build() -> None:
            try:
                store = PrefixStore(prefix, TCPStore(*address, timeout=_BUILD_TIME))
                built.append(self._new_group(store, rank, size))
            except Exception as error:
                errors.append(error)
            self._supervision.notify()
            former.clear()  # destroys the groups that are given up, which takes a while

        builder = threading.Thread(target=build, name="builder", daemon=True)
        self._builders = [b for b in self._builders if b.is_alive()] + [builder]
        builder.start()
        if not self._supervision.wait(lambda: bool(built or errors)):
            raise GenerationLost("a rank died while the group was built")
        if errors:
            # An error while ranks connect may be the first sign of a loss.
            if self._supervision.is_lost(self._notice_s):
                raise GenerationLost(str(errors[0]))
            raise errors[0]
        if self.name == "gloo":
            connections.end()
        return built[0]

    def _new_group(self, store: Any, rank: int, size: int) -> Any:
        if self.name != "gloo":
            return device_group(self.name, store, rank, size, self._timeout_s, self.device)
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        # Connecting is given less time than a collective, which may wait for a slow rank.
        gloo._timeout = _BUILD_TIME
        group = dist.ProcessGroupGloo(store, rank, size, gloo)
        group._set_default_timeout(timedelta(seconds=self._timeout_s))
        return group

    def _cut(self) -> None:
        """Make collectives of the present group fail, from another thread."""
        cut(self.name, [self.group], self._connections)
        for part in list(self._subgroups):
            part.give_up()

    def _finish(self, work: Any, is_message: bool = False) -> None:
        self._wait(work, finish_message if is_message else finish, self._connections)

    def _wait(self, work: Any, finish: Finish, own: Connections) -> None:
        if self.name != "gloo":
            # `wait` returns at once; and what was aborted ends as if all were well.
            work.wait()
            if self._is_in_stream:
                return
            torch.accelerator.current_stream(self.device).synchronize()
            if self._supervision.is_lost() or own.are_shut:
                raise GenerationLost("a rank died")
            return
        try:
            finish(work, lambda: self._supervision.is_lost() or own.have_closed())
        except LeftBehind as transfer:
            self._left_behind.append(transfer)
            raise
