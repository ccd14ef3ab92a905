"""A network that delays and loses frames, in a process of its own, for kernels without netem.

Each host's interface is a TAP device whose other end this process holds: it reads the frames that
hosts send, loses some, keeps the others for a while and writes them to the host that they are for.
Run as a script in the namespace of the switch; it ends when its standard input does.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass, field

TAP = "tap"
"""Interfaces are called this with the number of the host behind it."""

READY = "ready\n"
"""What this process prints when the interfaces are there."""

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_MOST_FRAME = 65_536
_BURST = 64
"""Most frames that are read of a host before it is another's turn."""

_OWN = b"\x02\x00\x00\x00"


def mac_of(host: int) -> str:
    """The address of a host's interface, which tells this process where a frame is to go."""
    return (_OWN + (host + 1).to_bytes(2, "big")).hex(":")


def receivers(frame: bytes, sender: int, num_hosts: int) -> list[int]:
    """The hosts that a frame is for: one, or all others where it is for many."""
    if frame[0] & 1:
        return [host for host in range(num_hosts) if host != sender]
    host = int.from_bytes(frame[4:6], "big") - 1
    return [host] if frame[:4] == _OWN and 0 <= host < num_hosts and host != sender else []


@dataclass
class Wire:
    """The frames that are on their way.

    Attributes:
        taps: file descriptor of each host's interface, not blocking.
        delay_s: seconds that a frame is kept.
        loss: share of the frames that are lost.
        source: what draws which.
    """

    taps: list[int]
    delay_s: float
    loss: float
    source: random.Random
    _kept: collections.deque[tuple[float, int, bytes]] = field(default_factory=collections.deque)

    def run(self, end: int) -> None:
        """Carry frames until file descriptor `end` can be read or is closed."""
        while True:
            wait = max(0.0, self._kept[0][0] - time.monotonic()) if self._kept else None
            ready, _, _ = select.select([end, *self.taps], [], [], wait)
            if end in ready:
                return
            for tap in ready:
                self._take(self.taps.index(tap))
            self._deliver()

    def _take(self, sender: int) -> None:
        due = time.monotonic() + self.delay_s
        with contextlib.suppress(OSError):  # nothing more to read, or the host is gone
            for _ in range(_BURST):
                frame = os.read(self.taps[sender], _MOST_FRAME)
                if self.loss and self.source.random() < self.loss:
                    continue
                for receiver in receivers(frame, sender, len(self.taps)):
                    self._kept.append((due, receiver, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._kept and self._kept[0][0] <= now:
            _, receiver, frame = self._kept.popleft()
            with contextlib.suppress(OSError):  # a full queue, or a host that is gone, loses it
                os.write(self.taps[receiver], frame)


def open_tap(host: int) -> int:
    """Make the interface of a host in this process's network namespace; its other end."""
    tap = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    name = f"{TAP}{host}".encode()
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH14x", name, _IFF_TAP_NO_PI))
    return tap


def main(num_hosts: int, delay_s: float, loss: float, seed: int) -> None:
    try:
        taps = [open_tap(host) for host in range(num_hosts)]
    except OSError as error:
        sys.exit(f"{_DEVICE}: {error.strerror}")
    print(READY, end="", flush=True)
    Wire(taps, delay_s, loss, random.Random(seed)).run(sys.stdin.fileno())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
