"""Key-value stores in which ranks find each other, and groups of devices that meet there.

Stores of one host listen on loopback only: a store does not authenticate those who connect, and
torch's own listens on all interfaces.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from lockstep.comm.host import is_loopback
from lockstep.errors import EnvironError, alone

LOOPBACK = "127.0.0.1"

_HOSTED_BY_US = "lockstep/world_size"
"""A key that rank 0 sets as soon as it hosts a store."""
_TAKEN_BY = "lockstep/taken"
"""What keys begin with that say which process is which rank."""
_ANSWER = timedelta(seconds=8)
"""How long a rank that has reached a store waits for that key."""
_POLL_S = 0.05

_hosted: dict[int, TCPStore] = {}
"""Stores by port. They live as long as this process: another rank may have connected already for a
script's next training when this one ends the training before."""

_NO_WATCHDOGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Variables without which torch's own threads end a process whose peer is lost."""

_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def host_store(port: int, timeout: timedelta) -> TCPStore:
    """Host a store that listens on loopback only, without waiting for other ranks.

    Further trainings of a script get the same store.

    Args:
        port: TCP port to listen on; 0 for a free one.
        timeout: time to wait for a key.

    Raises:
        OSError: something else listens on the port.
    """
    if port in _hosted:
        return _hosted[port]
    listener = socket.create_server((LOOPBACK, port), backlog=1024)
    port = listener.getsockname()[1]
    _hosted[port] = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return _hosted[port]


def check_interfaces() -> None:
    """Refuse a network interface for gloo that this host does not have.

    Raises:
        EnvironError: GLOO_SOCKET_IFNAME names one.
    """
    there = [name for _, name in socket.if_nameindex()]
    value = os.environ.get(_GLOO_INTERFACE, "")
    for name in filter(None, value.split(",")):
        if name not in there:
            raise alone(
                EnvironError(
                    f"{_GLOO_INTERFACE}={value}: {socket.gethostname()} has no network interface "
                    f"{name} (there are: {', '.join(there)}); set it to one of these, or unset it"
                )
            )


def meet_at(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """The store of a group of ranks; rank 0 hosts it, unless torchrun does.

    Where the address is a loopback one, so are those that gloo and NCCL will listen on.

    Args:
        host: name or address of rank 0's host.
        port: TCP port of the store.
        rank: rank of this process.
        size: number of ranks.
        timeout: time to wait for rank 0, and for a key.

    Raises:
        EnvironError: something else listens on the port, on whichever rank this is found.
    """
    try:
        return _met_at(host, port, rank, size, timeout)
    except EnvironError as error:
        raise alone(error) from None


def _met_at(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    try:
        store = _store_at(host, port, rank, size, timeout)
    except (OSError, RuntimeError) as error:  # torch's are of the second kind
        if rank == 0 and "address already in use" in str(error).lower():
            raise EnvironError(
                f"MASTER_PORT={port}: something else listens on {host}:{port}, maybe another job; "
                "set MASTER_PORT to a free port, the same on all ranks"
            ) from None
        raise
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return store  # torchrun's own
    if rank == 0:
        store.set(_HOSTED_BY_US, str(size))
        return store
    try:
        store.wait([_HOSTED_BY_US], _ANSWER)
    except (OSError, RuntimeError):
        raise _not_ours(host, port) from None
    there = store.get(_HOSTED_BY_US).decode(errors="replace")
    if there != str(size):
        raise EnvironError(
            f"WORLD_SIZE={size}: rank 0 at {host}:{port} was started as one of {there} ranks; set "
            "WORLD_SIZE to the same number on all ranks, or MASTER_PORT to the port of this job"
        )
    own = f"process {os.getpid()} of {socket.gethostname()}"
    first = store.compare_set(f"{_TAKEN_BY}/{rank}", "", own).decode(errors="replace")
    if first != own:
        raise EnvironError(
            f"RANK={rank}: {first} has this rank, too; start each rank once, with a RANK of its own"
        )
    return store


def _store_at(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    if is_loopback(host):
        host = LOOPBACK
        interface = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if interface is not None:
            os.environ.setdefault(_GLOO_INTERFACE, interface)
            os.environ.setdefault(_NCCL_INTERFACE, interface)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        if host == LOOPBACK:
            return host_store(port, timeout)
        # Waiting for the others here would keep from them, until the last has come, whose store it
        # is. `multi_tenant` lets a script's next training have the same one.
        return TCPStore(host, port, size, True, timeout, wait_for_workers=False, multi_tenant=True)
    _wait_for_listener(host, port, timeout)
    store = _connected(host, port)
    if store is None:
        raise _not_ours(host, port)
    store.set_timeout(timeout)
    return store


def _connected(host: str, port: int) -> TCPStore | None:
    answers: SimpleQueue[TCPStore | None] = SimpleQueue()

    def connect() -> None:
        try:
            answers.put(TCPStore(host, port, timeout=_ANSWER, wait_for_workers=False))
        except RuntimeError:
            answers.put(None)

    # Beside this thread, since torch connects again and again, long after its timeout, to what
    # accepts a connection and says nothing.
    threading.Thread(target=connect, daemon=True).start()
    with suppress(Empty):
        return answers.get(timeout=_ANSWER.total_seconds())
    return None


def _wait_for_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until something listens on a port: rank 0 may come late."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=_ANSWER.total_seconds()).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise EnvironError(
                    f"MASTER_PORT={port}: rank 0 has not come to {host}:{port} within "
                    f"{timeout.total_seconds():g} s ({error.strerror or error}); start all ranks, "
                    "with the same MASTER_ADDR and MASTER_PORT"
                ) from None
        time.sleep(_POLL_S)


def _not_ours(host: str, port: int) -> EnvironError:
    return EnvironError(
        f"MASTER_PORT={port}: what listens on {host}:{port} is not rank 0 of this job (it has not "
        f"answered within {_ANSWER.total_seconds():g} s); set MASTER_PORT to a free port, the same "
        "on all ranks"
    )


def device_group(
    backend: str, store: Any, rank: int, size: int, timeout_s: float, device: torch.device
) -> Any:
    """A group of ranks on devices that does not end the process when a rank is lost.

    It is connected when this returns: the first collective would connect it in a step, where
    nothing wakes a rank that waits for one that has died meanwhile.

    Args:
        backend: `nccl`, or a backend that was registered with torch.
        store: where the ranks meet.
        rank: rank of this process.
        size: number of ranks.
        timeout_s: seconds that a collective may take.
        device: device of this rank.
    """
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        os.environ.update(_NO_WATCHDOGS)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
    else:
        made = dist.Backend._plugins[backend.upper()]
        if made.extended_api:
            options: Any = distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
            options.store, options.group_rank, options.group_size = store, rank, size
            options.timeout = timeout
            group = made.creator_fn(options, None)
        else:
            group = made.creator_fn(store, rank, size, timeout)
    group.eager_connect_single_device(device)
    return group
