"""Seconds that a rank has spent by kind of work, and its use of cores, memory and the network."""

from __future__ import annotations

import os
from contextlib import suppress
from operator import sub
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from lockstep.comm.calls import Traffic

if TYPE_CHECKING:
    import torch

_KIB = 1024
"""Bytes of the unit in which Linux counts memory."""
_IDLE = (3, 4)
"""Columns of a line of /proc/stat that are not work: idle, and waiting for a disk."""
_GUESTS = 8
"""Number of columns of a line of /proc/stat that count: those of guests are in others already."""
_EVERY_S = 0.25
"""Reading /proc takes longer than all the rest, so it is not done in every step."""
_SOON_S = 0.02
"""A system call takes some microseconds, which counts in a short step, but not in a long one."""


class Usage(NamedTuple):
    """Counters since the process, or the machine, was started.

    Attributes:
        cpu_s: seconds that all threads of this process have computed.
        cores_s: seconds of work of any process on the cores that it may run on; as of a moment
            ago. 0 where the system does not say.
        faults: page faults that had to read from a disk.
        preemptions: how often another process has taken a core from it.
        peak_bytes: its greatest memory so far; as of a moment ago if a larger process has started
            it.
        swapped_bytes: memory that is swapped out; as of a moment ago.
        device_bytes: the most memory that its tensors have had on its device.
        device_retries: how often the device's allocator had to give back what it kept.
        device_busy: part of the time in which the device has computed lately, for anybody; 0 where
            that is not known.
    """

    cpu_s: float
    cores_s: float
    faults: int
    preemptions: int
    peak_bytes: int
    swapped_bytes: int
    device_bytes: int
    device_retries: int
    device_busy: float


class UsageMeter:
    """Reads counters.

    Args:
        device: device of the process; the CPU by default.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type != "cpu" else None
        self._on_device, self._device_read_at = (0, 0, 0.0), -_EVERY_S
        self._cores_s, self._read_at = 0.0, -_EVERY_S
        self._peak_bytes, self._swapped_bytes = _memory()
        # `ru_maxrss` of a process is that of the one that started it, if that was larger.
        self._inherited = getrusage(RUSAGE_SELF).ru_maxrss * _KIB
        if self._inherited <= self._peak_bytes or not self._peak_bytes:
            self._inherited = 0
        self._newest_at = perf_counter()
        self._newest = self._counters(self._newest_at)

    def read(self, is_exact: bool = True) -> Usage:
        """The counters as they are now, or, if not `is_exact`, as of some milliseconds ago."""
        now = perf_counter()
        if self._device is not None and is_exact and now - self._device_read_at >= _EVERY_S:
            peak, retries, busy = _device_usage(self._device)
            # Whoever captures a CUDA graph measures a peak of its own.
            self._on_device = max(peak, self._on_device[0]), retries, busy
            self._device_read_at = now
        if is_exact or now - self._newest_at >= _SOON_S:
            self._newest, self._newest_at = self._counters(now), now
        return self._newest

    def _counters(self, now: float) -> Usage:
        used = getrusage(RUSAGE_SELF)
        if now - self._read_at >= _EVERY_S:
            self._cores_s, self._read_at = _work_of_cores(), now
            self._peak_bytes, self._swapped_bytes = _memory()
        peak = used.ru_maxrss * _KIB
        return Usage(
            cpu_s=used.ru_utime + used.ru_stime,
            cores_s=self._cores_s,
            faults=used.ru_majflt,
            preemptions=used.ru_nivcsw,
            peak_bytes=peak if peak > self._inherited else self._peak_bytes,
            swapped_bytes=self._swapped_bytes,
            device_bytes=self._on_device[0],
            device_retries=self._on_device[1],
            device_busy=self._on_device[2],
        )


def _device_usage(device: torch.device) -> tuple[int, int, float]:
    """As the fields of `Usage`; waits for nothing that the device does."""
    import torch  # which who only reads events does without

    stats, busy = dict[str, int](), 0.0
    with suppress(RuntimeError, AttributeError):  # a package's device need not say
        stats = torch.accelerator.memory_stats(device)
    if device.type == "cuda":
        with suppress(Exception):  # there is no pynvml, or the driver does not say
            busy = torch.cuda.utilization(device) / 100
    peak, retries = stats.get("allocated_bytes.all.peak", 0), stats.get("num_alloc_retries", 0)
    return int(peak), int(retries), busy


def counted_cores() -> int:
    """Cores that this process may run on, whose work `UsageMeter` counts; 0 if not known."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def _work_of_cores() -> float:
    if not hasattr(os, "sched_getaffinity"):
        return 0.0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *columns = line.split()
                if not name.startswith("cpu"):
                    break  # cores come first
                if name in names:
                    spent = map(int, columns[:_GUESTS])
                    ticks += sum(n for place, n in enumerate(spent) if place not in _IDLE)
    except (OSError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory() -> tuple[int, int]:
    """Peak and swapped-out memory of this process in bytes; 0 where the system does not say."""
    found = {"VmHWM": 0, "VmSwap": 0}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * _KIB
    return found["VmHWM"], found["VmSwap"]


class Times(NamedTuple):
    """What a rank has spent; the first fields are those of `Stopwatch`, the next ones of `Usage`.

    Attributes:
        cpu_s: seconds that all its threads have computed.
        cores_s: seconds of work of any process on the cores that it may run on.
        faults: page faults that had to read from a disk.
        preemptions: how often another process has taken a core from it.
        peak_bytes: its greatest memory so far.
        swapped_bytes: memory that is swapped out at the moment.
        device_bytes: the most memory of its tensors on its device so far.
        device_retries: how often the device's allocator had to give back what it kept.
        device_busy: part of the time in which the device has computed lately; 0 if not known.
        num_calls: collectives, and messages sent or received; see `Traffic`.
        sent_bytes: bytes for other ranks.
        received_bytes: bytes from other ranks.
        grad_norm: norm of the mean gradient of its own samples, of a step that is reported; else 0.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    cpu_s: float = 0.0
    cores_s: float = 0.0
    faults: float = 0.0
    preemptions: float = 0.0
    peak_bytes: float = 0.0
    swapped_bytes: float = 0.0
    device_bytes: float = 0.0
    device_retries: float = 0.0
    device_busy: float = 0.0
    num_calls: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    grad_norm: float = 0.0

    @property
    def memory_bytes(self) -> int:
        """The most memory so far: of the device, where there is one that says it."""
        return int(self.device_bytes or self.peak_bytes)

    def plus(self, other: Times) -> Times:
        """The sum of both; of memory and `device_busy` the maximum, of gradients the later one."""
        both = [one + more for one, more in zip(self, other, strict=True)]
        for place in _PRESENT:
            both[place] = max(self[place], other[place])
        return Times._make(both)._replace(grad_norm=other.grad_norm)

    def since(self, before: Times) -> Times:
        """What was spent since `before`; of what does not add up, the present values."""
        # In each step, so without a generator and `_replace`, which take three times as long.
        spent = [*map(sub, self, before)]
        for place in _PRESENT:
            spent[place] = self[place]
        return Times._make(spent)


_PRESENT = [
    *map(
        Times._fields.index,
        ("peak_bytes", "swapped_bytes", "device_bytes", "device_busy", "grad_norm"),
    )
]
"""Of what does not add up."""


class Stopwatch:
    """Adds up seconds by kind of work since it was made.

    Attributes:
        compute_s: seconds in forward and backward passes, folding and the optimizer.
        communication_s: seconds in collectives, waiting for slower ranks included.
        data_s: seconds of waiting for batches.
        checkpoint_s: seconds in which training stood still for checkpoints.

    Args:
        traffic: counters of the transport of all ranks.
        device: device of this rank; the CPU by default.
    """

    def __init__(self, traffic: Traffic | None = None, device: torch.device | None = None) -> None:
        self.now = perf_counter()
        self.compute_s = self.communication_s = self.data_s = self.checkpoint_s = 0.0
        self._traffic, self._meter = traffic or Traffic(), UsageMeter(device)
        self._newest: Usage | None = None
        self._first, self._used = Times(0, 0, 0, 0, *self._meter.read()), tuple[float, ...]()
        counts = self._traffic
        self._sent = counts.num_calls, counts.sent_bytes, counts.received_bytes

    def start(self) -> None:
        """Begin to measure: the next `lap` counts from here."""
        self.now = perf_counter()

    def lap(self) -> float:
        """Seconds since the last `start` or `lap`."""
        before = self.now
        self.now = perf_counter()
        return self.now - before

    @property
    def worked_s(self) -> float:
        """Seconds in steps: all but those for checkpoints."""
        return self.compute_s + self.communication_s + self.data_s

    def end_pass(self, waited_s: float) -> None:
        """Count a backward pass, and apart from it the seconds that an exchange took inside it."""
        self.compute_s += self.lap() - waited_s
        self.communication_s += waited_s

    def times(self, is_exact: bool = True) -> Times:
        """All four sums, and what the process has used and sent meanwhile.

        Args:
            is_exact: whether the process's counters are read now; else as `UsageMeter.read` says.
        """
        newest = self._meter.read(is_exact)
        if newest is not self._newest:  # of several short steps one only
            self._newest = newest
            self._used = Times(0, 0, 0, 0, *newest).since(self._first)[4 : 4 + len(newest)]
        counts, (num_calls, sent_bytes, received_bytes) = self._traffic, self._sent
        return Times._make(
            (
                self.compute_s,
                self.communication_s,
                self.data_s,
                self.checkpoint_s,
                *self._used,
                counts.num_calls - num_calls,
                counts.sent_bytes - sent_bytes,
                counts.received_bytes - received_bytes,
                0.0,
            )
        )
