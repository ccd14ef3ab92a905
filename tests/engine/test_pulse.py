"""A process's sign of life costs a file only while somebody watches it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from lockstep.engine.runtime import NUM_BYTES, Pulse

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_pulses_open_no_files_and_watched_ones_close_theirs() -> None:
    before = num_files()
    pulses = [Pulse() for _ in range(20)]
    assert num_files() == before
    assert len({pulse.fd for pulse in pulses}) == 20
    assert num_files() > before
    pulses.clear()
    assert num_files() == before


def test_what_was_told_before_somebody_watched_is_there() -> None:
    pulse = Pulse()
    pulse.beat()
    pulse.arm()
    assert struct.unpack("3q", os.pread(pulse.fd, NUM_BYTES, 0)) == (1, 0, 1)
    pulse.wait()
    assert struct.unpack("3q", os.pread(pulse.fd, NUM_BYTES, 0)) == (1, 1, 1)
