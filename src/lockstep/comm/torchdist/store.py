"""Key-value stores in which ranks find each other; those of one host listen on loopback only.

A store does not authenticate those who connect, and torch's own listens on all interfaces.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

LOOPBACK = "127.0.0.1"

_hosted: dict[int, TCPStore] = {}
"""Stores by port. They live as long as this process: another rank may have connected already for a
script's next training when this one ends the training before."""

_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def is_loopback(host: str) -> bool:
    """Whether a host's name or address says that only processes of the same host can reach it.

    What a name is resolved to does not count: many hosts know themselves by a loopback address.
    """
    return host == "localhost" or host.startswith("127.")


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


def meet_at(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """The store of a group of ranks; rank 0 hosts it, unless torchrun does.

    Where the address is a loopback one, so are those that gloo and NCCL will listen on.

    Args:
        host: name or address of rank 0's host.
        port: TCP port of the store.
        rank: rank of this process.
        size: number of ranks.
        timeout: time to wait for rank 0, and for a key.
    """
    if not is_loopback(host):
        store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timeout))
        return store
    interface = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if interface is not None:
        os.environ.setdefault(_GLOO_INTERFACE, interface)
        os.environ.setdefault(_NCCL_INTERFACE, interface)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return host_store(port, timeout)
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timeout, wait_for_workers=False)
