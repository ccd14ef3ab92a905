"""Memory that the ranks of one host share: large arrays, and small all-gathers without messages.

A rank's memory is anonymous (memfd_create(2)): no file system has it, so a small /dev/shm is no
limit, and nothing is left of it when the last process that maps it has ended, in whatever way. The
others open it by its descriptor in /proc while its owner keeps that open, which is until all have
mapped it.

A library's message between processes of one host costs tens of microseconds; MPI spins while it
waits for one, and gloo's threads are woken for each. Here a rank writes what it has to say into
memory of its own, counts that in a word that the others look at, and reads what they have written.

Each rank has two places for messages, used in turn. It writes into one again after a message of
each of the others has come that was sent when they had read what was there before: so nobody waits
for readers.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
import select
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import GroupBroken, Traffic, Transport, offsets

_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
_NUMBER = 202
"""Of the system call, on x86-64."""

IS_THERE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether this system has futexes, on a processor that keeps stores in order.

What a process has written before it changes a word is then seen by whoever sees that change.
"""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_system = _libc.syscall


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word has a value; it may also return for no reason.

    Args:
        address: address of a word of 4 bytes, in memory that is shared.
        value: value that the word had a moment ago.
        seconds: longest time to sleep.

    Raises:
        OSError: there is no such memory.
    """
    whole = int(seconds)
    time = _Time(whole, int((seconds - whole) * 1e9))
    number, nothing = ctypes.c_long(_NUMBER), ctypes.c_void_p(None)
    word, expected = ctypes.c_void_p(address), ctypes.c_uint32(value)
    if _system(number, word, _WAIT, expected, ctypes.byref(time), nothing, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))


class Waker:
    """Wakes all that sleep until a word changes."""

    def __init__(self, address: int) -> None:
        """Prepare the system call, of which each step makes one."""
        self._arguments = (
            ctypes.c_long(_NUMBER),
            ctypes.c_void_p(address),
            ctypes.c_int(_WAKE),
            ctypes.c_int(_EVERYONE),
        )

    def wake(self) -> None:
        """Wake them."""
        _system(*self._arguments)


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
            OSError: this system does not tell what.
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
        """Let nobody else map it any more; the tensor stays."""
        self._close()


def allocate(num_bytes: int) -> SharedMemory | str:
    """Memory that others can map, or why there is none."""
    try:
        return SharedMemory(num_bytes)
    except OSError as error:
        return _told(error)


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
            problem = _told(error)
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
        return _told(error)


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


def _first(said: list[Any]) -> str:
    """The first rank's problem; empty where no rank has any."""
    return next((f"rank {r}: {p}" for r, p in enumerate(said) if p and isinstance(p, str)), "")


def _apart(offers: list[dict[str, Any]]) -> str:
    """The problem of ranks on different hosts; empty if there is one."""
    num_hosts = len({offer["host"] for offer in offers})
    return f"the ranks are on {num_hosts} hosts" if num_hosts > 1 else ""


def _told(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return where + (error.strerror or str(error))


CAPACITY = 5 << 18
"""Bytes of the longest message."""

_WORD_BYTES = 64
"""A cache line for the word that others look at."""
_NUM_BYTES = _WORD_BYTES + 2 * CAPACITY
"""Of the memory of a rank."""
_MASK = 2**32 - 1
_SPIN_NS = 200_000
"""For so long a quick answer is looked for before this process sleeps, if each has a core."""
_LEAST_SPIN_NS = 5_000
_LOOK_S = 0.002
"""So often a process that sleeps looks whether it does so in vain."""


class Mailbox:
    """Messages of the ranks of a group that are all on this host."""

    def __init__(
        self,
        rank: int,
        memories: Sequence[Tensor],
        processes: Sequence[int],
        has_cores: bool,
        check: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Use memory that all ranks have mapped.

        Args:
            rank: rank of this process.
            memories: memory of each rank, all zero at first.
            processes: the process of each rank.
            has_cores: whether each rank has a core to itself, as far as is known.
            check: function that raises an exception if waiting is in vain.
            timeout_s: seconds after which a wait is given up.

        Raises:
            OSError: a process is not there any more.
        """
        self._rank, self._memories = rank, list(memories)
        self._starts = [memory.data_ptr() for memory in memories]
        self._words = [(ctypes.c_uint32 * 1).from_address(start) for start in self._starts]
        self._waker = Waker(self._starts[rank])
        self._others = [r for r in range(len(memories)) if r != rank]
        self._lives = _Lives([processes[r] for r in self._others])
        self._check, self._timeout_s = check, timeout_s
        self._most_spin_ns = _SPIN_NS if has_cores else 0
        self._spin_ns = self._most_spin_ns
        self._count = 0

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int], traffic: Traffic) -> None:
        """See `Transport.all_gather`; of at most `CAPACITY` bytes in `out`.

        Args:
            own: as there.
            out: as there.
            counts: as there.
            traffic: where the bytes are counted.

        Raises:
            GroupBroken: a rank has died, or has given the group up.
            RuntimeError: a rank takes too long.
        """
        size, target = out.itemsize, out.data_ptr()
        self._count = count = (self._count + 1) & _MASK
        place = _WORD_BYTES + (count & 1) * CAPACITY
        rank, starts = self._rank, offsets(counts)
        mine, length = own.data_ptr(), counts[rank] * size
        traffic.add(length * len(self._others), out.nbytes - length)
        ctypes.memmove(self._starts[rank] + place, mine, length)
        # The store that says so comes after what it speaks of (`IS_THERE`).
        self._words[rank][0] = count
        self._waker.wake()
        if mine != target + starts[rank] * size:
            ctypes.memmove(target + starts[rank] * size, mine, length)
        for other in self._others:
            if (self._words[other][0] - count) & _MASK > 1:
                self._await(other, count)
            here = target + starts[other] * size
            ctypes.memmove(here, self._starts[other] + place, counts[other] * size)

    def _await(self, other: int, count: int) -> None:
        """Return when a rank has sent its message of a number, or the next one."""
        word, since = self._words[other], monotonic_ns()
        until = since + self._spin_ns
        while monotonic_ns() < until:
            if (word[0] - count) & _MASK <= 1:
                break
        else:
            self._sleep(other, count)
        # Also after a sleep that looking on would have ended soon: what it took is in part that
        # processes had to be woken, here and there, and would be for ever if each of them looked
        # for less long after it.
        if monotonic_ns() - since <= self._most_spin_ns:
            spin_ns = 2 * self._spin_ns
        else:  # another time it takes less of a core that others may need
            spin_ns = max(self._spin_ns // 2, _LEAST_SPIN_NS)
        self._spin_ns = min(spin_ns, self._most_spin_ns)

    def _sleep(self, other: int, count: int) -> None:
        word, since = self._words[other], monotonic_ns()
        while ((value := word[0]) - count) & _MASK > 1:
            wait(self._starts[other], value, _LOOK_S)
            if (word[0] - count) & _MASK <= 1:
                return
            self._check()
            # What it had sent before it died counts.
            if self._lives.have_ended() and (word[0] - count) & _MASK > 1:
                raise GroupBroken("a rank of this host has died")
            if monotonic_ns() - since > self._timeout_s * 1e9:
                raise RuntimeError(f"rank {other} has sent nothing for {self._timeout_s:g} s")


class _Lives:
    """Whether processes have ended, also such that nobody has waited for."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._poll = select.poll()
        descriptors: list[int] = []
        weakref.finalize(self, _close, descriptors)
        for process in processes:
            descriptors.append(os.pidfd_open(process))
            self._poll.register(descriptors[-1], select.POLLIN)

    def have_ended(self) -> bool:
        """Whether any of them has."""
        return bool(self._poll.poll(0))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_mailbox(
    transport: Transport, check: Callable[[], None], timeout_s: float = math.inf
) -> Mailbox | str:
    """A mailbox of all ranks, or why they cannot have one; a collective, the same on all.

    Args:
        transport: transport between the ranks.
        check: function that raises an exception if waiting for others is in vain.
        timeout_s: seconds after which a wait is given up.

    Raises:
        GroupBroken: a rank was lost.
    """
    memory = allocate(_NUM_BYTES) if IS_THERE else "this system has no futexes"
    memories = map_all(transport, memory)
    if isinstance(memories, str):
        return memories
    known = transport.gather_json([os.getpid(), sorted(os.sched_getaffinity(0))])
    processes = [process for process, _ in known]
    cores = {core for _, own in known for core in own}
    made: Mailbox | None = None
    problem = ""
    try:
        has_cores = len(cores) >= transport.size
        made = Mailbox(transport.rank, memories, processes, has_cores, check, timeout_s)
    except OSError as error:
        problem = f"rank {transport.rank}: {error.strerror}"
    problems = list(filter(None, transport.gather_json(problem)))
    return problems[0] if problems or made is None else made
