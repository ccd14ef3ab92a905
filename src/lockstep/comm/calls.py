"""The newest calls of a rank's transport, in memory that others can read; and their counts.

A ring of fixed size: a call costs less than a microsecond and no memory. What is in the memory is
also the format of the files that are written of it (`lockstep.comm.call_records` reads them), since
a process that hangs has to be helped: its watchdog copies the memory.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from types import MappingProxyType
from typing import Any

KINDS = (
    "all_gather", "all_to_all", "broadcast", "barrier", "agree", "subgroup", "regroup",
    "send", "receive", "finish_sending",
)  # fmt: skip
"""Methods of a transport that are recorded, by the number that stands for them."""

FIRST_MESSAGE = KINDS.index("send")
"""From here on they concern two ranks: only these two count them."""

MAGIC = 0x4C53_4341_4C4C_5301
"""The first number of the memory; the last byte is the version of the format."""

NUM_RECORDS = 1024
HEADER = struct.Struct("=8q")
"""`MAGIC`, number of calls before the present group, rank, size, committed steps, calls that have
failed in the present group, bytes of the text that follows, and nothing."""

HEADER_BYTES = 4096
"""The header and, in JSON, the ranks of each subgroup: null, or a list of ranks, or first, last + 1
and step (`{"range": [0, 8, 2]}`)."""

RECORD = struct.Struct("=8q")
"""Number of the call among all of this rank (from 1; 0 where there was none yet), kind + 256 group,
number of the call in the group (from 1), bytes that this rank gives, bytes that it has afterwards,
the other rank of a message (else -1), and when the call began and ended in nanoseconds of Unix
time: 0 while it has not, negative if it has failed."""

NUM_BYTES = HEADER_BYTES + NUM_RECORDS * RECORD.size

_START, _RANK, _SIZE, _STEP, _FAILED, _TEXT = range(1, 7)
_WORD = 8
_RECORD_BYTES, _RECORD_WORDS = RECORD.size, RECORD.size // _WORD
_FIRST_ENDED = (HEADER_BYTES + _RECORD_BYTES) // _WORD - 1
_pack = RECORD.pack_into


def sized_memory(name: str, num_bytes: int) -> int:
    """File descriptor of new memory without a file; -1 where there is none.

    This system may lack it, and limits on files (`ulimit -f`, `ulimit -n`) count for it too.
    """
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = -1
    try:
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


class CallGroup:
    """A group of ranks, as far as calls are counted in it.

    Attributes:
        code: 256 times its number: 0 for all ranks; subgroups count from 1, alike on all ranks,
            since the last regroup.
        num_calls: collectives that have been begun in it.
        num_messages: messages that have been begun, by kind and the other rank.
    """

    __slots__ = ("code", "num_calls", "num_messages")

    def __init__(self, number: int) -> None:
        self.code = 256 * number
        self.num_calls = 0
        self.num_messages: dict[tuple[int, int], int] = {}

    def next_message(self, kind: int, peer: int) -> int:
        """Count in a message; for the end of one, which is no call of its own, 0."""
        if peer < 0:
            return 0
        number = self.num_messages.get((kind, peer), 0) + 1
        self.num_messages[kind, peer] = number
        return number


class CallRing:
    """The newest `NUM_RECORDS` calls of a transport and its subgroups.

    The memory becomes a file with the first use of `fd`: most processes are not watched.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._count = self._num_groups = 0
        self._ranks: list[Any] = []
        self._use(memoryview(bytearray(NUM_BYTES)))
        self._words[0] = MAGIC

    def __reduce__(self) -> tuple[type[CallRing], tuple[()]]:
        """A copy has no calls: it is that of a model, or of something else that has a transport."""
        return CallRing, ()

    def _use(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("q")

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for a child process; -1 where there is no such memory.

        It is closed with this object.
        """
        if self._fd is None:
            self._fd = sized_memory("lockstep-calls", NUM_BYTES)
            if self._fd >= 0:
                weakref.finalize(self, os.close, self._fd)
                shared = memoryview(mmap.mmap(self._fd, NUM_BYTES))
                shared[:] = self._memory
                self._use(shared)
        return self._fd

    @property
    def has_failed(self) -> bool:
        """Whether a call of the present group has failed."""
        return bool(self._words[_FAILED])

    def start(self, rank: int, size: int) -> CallGroup:
        """Begin a group of all ranks, in which calls are counted from 1.

        Args:
            rank: rank of this process.
            size: number of ranks.
        """
        words = self._words
        words[_START], words[_RANK], words[_SIZE], words[_FAILED] = self._count, rank, size, 0
        self._num_groups, self._ranks = 0, []
        self._describe()
        return CallGroup(0)

    def subgroup(self, ranks: Sequence[int]) -> CallGroup:
        """Begin a subgroup; all ranks of the whole group do so at the same time.

        Args:
            ranks: those of this rank's subgroup, ascending.
        """
        self._num_groups += 1
        self._ranks.append(_in_short(ranks))
        self._describe()
        return CallGroup(self._num_groups)

    def _describe(self) -> None:
        """Write down the ranks of subgroups; of the last ones that do not fit, nothing."""
        known = list(self._ranks)
        room = HEADER_BYTES - HEADER.size
        while len(text := json.dumps(known, separators=(",", ":")).encode()) > room:
            known.pop()
        self._memory[HEADER.size : HEADER.size + len(text)] = text
        self._words[_TEXT] = len(text)

    def note_step(self, step: int) -> None:
        """Note how many steps are committed."""
        self._words[_STEP] = step

    def begin(self, group: CallGroup, kind: int, moved: tuple[int, int, int]) -> int:
        """Note that a call begins.

        Args:
            group: group that it is made in.
            kind: index in `KINDS`.
            moved: bytes that this rank gives, bytes that it has afterwards, and the other rank of
                a message; -1 for a collective.

        Returns:
            Its place, for `end`.
        """
        # Every step waits for this: each line costs a tenth of a microsecond.
        if kind < FIRST_MESSAGE:
            number = group.num_calls = group.num_calls + 1
        else:
            number = group.next_message(kind, moved[2])
        index = self._count % NUM_RECORDS
        self._count = count = self._count + 1
        what = kind + group.code
        place = HEADER_BYTES + index * _RECORD_BYTES
        _pack(self._memory, place, count, what, number, *moved, time_ns(), 0)
        return index * _RECORD_WORDS + _FIRST_ENDED

    def end(self, place: int, is_done: bool) -> None:
        """Note that the call at a place has ended, as it should or by an exception."""
        self._words[place] = time_ns() if is_done else -time_ns()
        if not is_done:
            self._words[_FAILED] += 1

    def copy(self) -> bytes:
        """What is in the memory: the content of a file of calls."""
        return bytes(self._memory)


Measure = Callable[..., tuple[int, int, int]]
"""From the arguments of a call to the bytes that a rank gives and has, and the rank it talks to."""

_MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "all_gather": lambda own, out, counts: (own.nbytes, out.nbytes, -1),
        "all_to_all": lambda send, send_counts, send_offsets, recv, recv_counts: (
            (sum(send_counts) * send.itemsize, recv.nbytes, -1)
        ),
        "finish": lambda started: started.moved,
        "gather_among": lambda out, ranks, counts: (out.nbytes, out.nbytes, -1),
        "broadcast": lambda tensor, root: (tensor.nbytes, tensor.nbytes, -1),
        "send": lambda tensor, to: (tensor.nbytes, 0, to),
        "receive": lambda tensor, source: (0, tensor.nbytes, source),
    }
)


def measure_of(name: str) -> Measure:
    """What measures the calls of a method of transports."""
    return _MEASURES.get(name, lambda *arguments, **keys: (0, 0, -1))


def _in_short(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Ranks in JSON: a range where they are one, as those of meshes are."""
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        whole = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
        if list(whole) == list(ranks):
            return {"range": [whole.start, whole.stop, whole.step]}
    return list(ranks)


class Traffic:
    """Counters of a transport and of its subgroups, since they were made.

    Bytes are those that ranks hand to each other, whatever way the library takes: what this rank
    gave to each of the others, and what it got from them.

    Attributes:
        num_calls: number of collectives, and of messages sent or received.
        sent_bytes: bytes for others.
        received_bytes: bytes from others.
    """

    __slots__ = ("num_calls", "received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.num_calls = self.sent_bytes = self.received_bytes = 0

    def add(self, sent_bytes: int, received_bytes: int) -> None:
        """Count in a call."""
        self.num_calls += 1
        self.add_shared(sent_bytes, received_bytes)

    def add_shared(self, sent_bytes: int, received_bytes: int) -> None:
        """Count in what others have read in this rank's memory, and it in theirs: no call."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
