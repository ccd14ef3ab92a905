"""The communicators of one run, and how ranks find each other by MPI alone."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from lockstep.comm.backend.work import Progress
from lockstep.comm.mpi.library import MPI, note_loss
from lockstep.comm.torchdist.store import LOOPBACK, host_store

# The largest tag that every MPI library has.
MAX_TAG = 32_767

_CONNECT_TIMEOUT_S = 3.0

# Of netdevice(7): the request for an interface's address, and where an `ifreq` has it.
_SIOCGIFADDR = 0x8915
_IFREQ, _IFREQ_ADDRESS = 40, slice(20, 24)


class MpiWorld:
    """All communicators that process groups have made out of one.

    After a process failure, revoke `communicators()` so that no survivor stays blocked in any
    of them, shrink one, and pass the result to `init_process_group`.

    Args:
        base: communicator whose ranks are the global ranks; it is used but not owned.
    """

    def __init__(self, base: MPI.Intracomm) -> None:
        self.base = base
        self.progress = Progress()
        self._live: list[MPI.Comm] = []

    def communicators(self) -> list[MPI.Comm]:
        """The communicators of all groups that are not shut down, oldest first."""
        return list(self._live)

    def duplicate(self) -> MPI.Intracomm:
        """A communicator of all ranks; collective over all.

        Raises:
            mpi4py.MPI.Exception: MPI reported an error.
        """
        return self._adopt(self.base.Dup())

    def subgroup(self, ranks: Sequence[int], name: str) -> MPI.Intracomm:
        """A communicator of some ranks, in that order; collective over those only.

        Args:
            ranks: ranks of `base`, in the order of the new group.
            name: name that is equal on all members; keeps groups made in several threads apart.

        Raises:
            mpi4py.MPI.Exception: MPI reported an error.
        """
        group = self.base.Get_group()
        members = group.Incl(ranks)
        try:
            tag = zlib.crc32(name.encode()) % MAX_TAG
            return self._adopt(self.base.Create_group(members, tag))
        finally:
            members.Free()
            group.Free()

    def free(self, comm: MPI.Comm) -> None:
        """Give a communicator back; the last one ends the progress thread."""
        self._live.remove(comm)
        _retire(comm)
        if not self._live:
            self.progress.stop()
            atexit.unregister(self._leave)

    def _adopt(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        # Open MPI 5 crashes on a rank where a revocation arrives before the communicator is
        # complete there. Past this barrier it is complete everywhere.
        comm.Barrier()
        if not self._live:
            atexit.register(self._leave)
        self._live.append(comm)
        return comm

    def _leave(self) -> None:
        """At exit with groups not shut down: make sure that `MPI_Finalize` will not hang."""
        for comm in self._live:
            if _is_damaged(comm):
                _retire(comm)


def _retire(comm: MPI.Comm) -> None:
    """Free a communicator, or revoke it if it is damaged.

    `MPI_Finalize` of Open MPI 5 may hang over one with interrupted operations, both when it has
    been freed and when it has not been revoked.
    """
    if not _is_damaged(comm):
        comm.Free()
        return
    note_loss()
    with contextlib.suppress(NotImplementedError, MPI.Exception):
        comm.Revoke()


def _is_damaged(comm: MPI.Comm) -> bool:
    """Whether the communicator is revoked or has lost members, as far as this rank knows."""
    try:
        return comm.Is_revoked() or comm.Get_failed().size > 0
    except NotImplementedError:  # an MPI without fault tolerance
        return False
    except MPI.Exception:
        return True


def create_store(comm: MPI.Intracomm, timeout: timedelta) -> Store:
    """A store shared by all ranks of `comm`, served by rank 0; collective over all.

    Rank 0 may have several addresses of which not all are reachable from everywhere, so every
    rank takes the first that answers.

    Raises:
        ConnectionError: some rank cannot reach rank 0; raised on all ranks.
        mpi4py.MPI.Exception: MPI reported an error.
    """
    if comm.size == 1:
        return HashStore()
    one_node = _on_one_node(comm)
    store: TCPStore | None = None
    error: str | None = None
    if comm.rank == 0:
        if one_node:
            store = host_store(0, timeout)
        else:
            store = TCPStore(LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
        comm.bcast(([LOOPBACK] if one_node else own_addresses(), store.port))
    else:
        addresses, port = comm.bcast(None)
        try:
            host = first_reachable(addresses, port)
            store = TCPStore(host, port, None, False, timeout)
        except (ConnectionError, dist.DistError) as failure:
            error = f"rank {comm.rank} on {socket.gethostname()}: {failure}"
    errors = [message for message in comm.allgather(error) if message]
    if errors or store is None:
        raise ConnectionError("; ".join(errors))
    return store


def own_addresses() -> list[str]:
    """The addresses under which other machines may know this one, most likely first."""
    name = socket.gethostname()
    addresses = [name]
    with contextlib.suppress(OSError):
        addresses += socket.gethostbyname_ex(name)[2]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only selects the outgoing interface.
        probe.connect(("192.0.2.1", 9))
        addresses.append(probe.getsockname()[0])
    # A name may be unknown, and a network of its own has no way out that could be selected.
    addresses += _interface_addresses()
    # A loopback address leads every other machine back to itself.
    return [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]


def _interface_addresses() -> list[str]:
    """The IPv4 address of each interface; none where the system is not Linux."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(_IFREQ, b"\0"))
                found.append(socket.inet_ntoa(answer[_IFREQ_ADDRESS]))
    return found


def first_reachable(addresses: Sequence[str], port: int) -> str:
    """The first address at which something listens on `port`.

    Raises:
        ConnectionError: there is none.
    """
    for address in addresses:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S),
        ):
            return address
    raise ConnectionError(f"nothing answers on port {port} of {', '.join(addresses)}")


def _on_one_node(comm: MPI.Intracomm) -> bool:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        # Nodes may differ in size, so all ranks must get the same answer.
        return bool(comm.allreduce(node.size == comm.size, op=MPI.LAND))
    finally:
        node.Free()
