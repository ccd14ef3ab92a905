"""Memory that the ranks of one host share.

A rank's memory is anonymous (memfd_create(2)): no file system has it, so a small /dev/shm is no
limit, and nothing is left of it when the last process that maps it has ended, in whatever way. The
others open it by its descriptor in /proc while its owner keeps that open, which is until all have
mapped it.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport

_NAME = "lockstep"
_PROC = Path("/proc")
_NAMESPACES = ("net", "pid")
"""Namespaces that ranks of one host have in common. Those that talk through a network between
namespaces (containers, `benchmarks/lab`) count as hosts of their own; those that do not see each
other's processes cannot name them."""


class SharedMemory:
    """Memory of this process that others of its host can map; all zero at first.

    Attributes:
        tensor: uint8 [num_bytes], at the beginning of a page.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate.

        Args:
            num_bytes: bytes, at least 1.

        Raises:
            OSError: there is too little memory, a limit of this process, or no such memory here.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd_create")
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        # All of it now: where memory is lacking this is an error, and the first touch a SIGBUS.
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        self.tensor = _mapped(self._descriptor, num_bytes)

    def offer(self) -> dict[str, Any]:
        """What others need to map it, as JSON.

        Raises:
            OSError: this system does not provide it.
        """
        status = os.fstat(self._descriptor)
        return {
            "host": _host(),
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "file": [status.st_dev, status.st_ino],
            "num_bytes": len(self.tensor),
        }

    def close(self) -> None:
        """Close the descriptor, so that no other process can map it; the tensor stays."""
        self._close()


def allocate(num_bytes: int) -> SharedMemory | str:
    """Memory that others can map, or why there is none."""
    try:
        return SharedMemory(num_bytes)
    except OSError as error:
        return _reason(error)


def hosts_of(transport: Transport) -> list[str]:
    """Tells which ranks of a group share a host: what each rank's is called; a collective."""
    try:
        host = _host()
    except OSError:
        host = socket.gethostname()
    return transport.gather_json(host)


def are_on_one_host(transport: Transport) -> bool:
    """Whether all ranks of a group are on one host; a collective."""
    return len(set(hosts_of(transport))) == 1


def map_all(transport: Transport, own: SharedMemory | str) -> list[Tensor] | str:
    """Every rank's memory, mapped by this one; a collective, of which all have the same outcome.

    Args:
        transport: transport between the ranks.
        own: memory of this rank, which nobody can map from then on; or why it has none.

    Returns:
        The memory of each rank, uint8, its own included; or why a rank cannot map that of another.
        A mapping lasts as long as a tensor refers to it, also when its owner has died.

    Raises:
        GroupBroken: a rank was lost.
    """
    offers = transport.gather_json(_offered(own))
    refusal = _first(offers) or _apart(offers)
    memories: list[Tensor] = []
    if not refusal:
        problem = ""
        try:
            memories = [_opened(o) for rank, o in enumerate(offers) if rank != transport.rank]
        except OSError as error:
            problem = _reason(error)
        # Also what an owner waits for before it closes its descriptor.
        refusal = _first(transport.gather_json(problem))
    if isinstance(own, SharedMemory):
        memories.insert(transport.rank, own.tensor)
        own.close()
    return refusal or memories


def _offered(own: SharedMemory | str) -> dict[str, Any] | str:
    try:
        return own if isinstance(own, str) else own.offer()
    except OSError as error:
        return _reason(error)


def _opened(offer: dict[str, Any]) -> Tensor:
    path = _PROC / str(offer["process"]) / "fd" / str(offer["descriptor"])
    # Looked at first: to open what something else has put there may have effects of its own.
    status = path.stat()
    if [status.st_dev, status.st_ino, status.st_size] != [*offer["file"], offer["num_bytes"]]:
        raise OSError(errno.ESTALE, f"{path} is another file")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(descriptor, offer["num_bytes"])
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    # The tensor keeps the mapping, which ends with it.
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _host() -> str:
    """Tells hosts apart: a running kernel, and what a process sees of it."""
    booted = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(_PROC / "self/ns" / name) for name in _NAMESPACES]
    return " ".join([socket.gethostname(), booted, *spaces])


def _first(everyone: list[Any]) -> str:
    """The first rank's problem; empty where no rank has any."""
    return next((f"rank {r}: {p}" for r, p in enumerate(everyone) if p and isinstance(p, str)), "")


def _apart(offers: list[dict[str, Any]]) -> str:
    """The problem of ranks on different hosts; empty if there is one."""
    num_hosts = len({offer["host"] for offer in offers})
    return f"the ranks are on {num_hosts} hosts" if num_hosts > 1 else ""


def _reason(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return where + (error.strerror or str(error))
