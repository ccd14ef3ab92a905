"""Small all-gathers of the ranks of one host, through memory that they share.

A library's message between processes of one host costs tens of microseconds; MPI spins while it
waits for one, and gloo's threads are woken for each. Here a rank writes its part into memory
of its own, increments a word that the others poll, and reads what they have written.

Each rank has two places for messages, used alternately. It writes into one again after a message of
each of the others has come that was sent when they had read what was there before: so nobody waits
for readers.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import select
import sys
import weakref
from collections.abc import Callable, Sequence
from time import monotonic_ns

from torch import Tensor

from lockstep.comm.calls import CallGroup, Traffic
from lockstep.comm.shared_memory import allocate, map_all
from lockstep.comm.transport import GroupBroken, Transport, offsets

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


CAPACITY = 5 << 18
"""Bytes of the longest message."""

_WORD_BYTES = 64
"""A cache line for the word that others look at."""
_NUM_BYTES = _WORD_BYTES + 2 * CAPACITY
"""Of the memory of a rank."""
_MASK = 2**32 - 1
_SPIN_NS = 200_000
"""How long this process spins before it sleeps, if each rank has a core."""
_LEAST_SPIN_NS = 5_000
_LOOK_S = 0.002
"""How often a sleeping process checks whether the others can still come."""


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
            check: function that raises an exception if the others will not come.
            timeout_s: seconds after which a wait is given up.

        Raises:
            OSError: a process has ended.
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
        check: function that raises an exception if the others will not come.
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


class HostTransport(Transport):
    """A transport that moves small all-gathers through a mailbox, where all ranks share a host."""

    _timeout_s = math.inf

    def __init__(self) -> None:
        super().__init__()
        self._mailbox: Mailbox | str | None = None

    def share_memory(self) -> None:
        """See `Transport.share_memory`."""
        if self._mailbox is None:
            self._mailbox = open_mailbox(self, self._look, self._timeout_s)

    @property
    def why_messages(self) -> str | None:
        """See `Transport.why_messages`."""
        return "" if isinstance(self._mailbox, Mailbox) else self._mailbox

    def _gathers(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> bool:
        """Whether the mailbox has done an all-gather; else it is left to the library."""
        if out.nbytes > CAPACITY or not isinstance(self._mailbox, Mailbox):
            return False
        self._mailbox.all_gather(own, out, counts, self.traffic)
        return True

    def _is_long(self, num_bytes: int) -> bool:
        """Whether moving so many bytes takes longer than to begin it early and wait for it."""
        return num_bytes > CAPACITY or not isinstance(self._mailbox, Mailbox)

    def _join_records(self, whole: Transport, calls: CallGroup) -> None:
        """Count calls, bytes and waits with those of the whole group, as a subgroup of it."""
        self.observer, self.traffic = whole.observer, whole.traffic
        self.call_ring, self.call_group = whole.call_ring, calls

    def _look(self) -> None:
        """Raise an exception if the ranks waited for will not come, where that can be known."""
