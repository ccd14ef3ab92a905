"""A process's heartbeat uses a file only while a watchdog reads it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from lockstep.engine.runtime import NUM_BYTES, Heartbeat

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_heartbeats_open_no_files_and_watched_ones_close_theirs() -> None:
    before = num_files()
    heartbeats = [Heartbeat() for _ in range(20)]
    assert num_files() == before
    assert len({heartbeat.fd for heartbeat in heartbeats}) == 20
    assert num_files() > before
    heartbeats.clear()
    assert num_files() == before


def test_beats_from_before_the_watchdog_are_kept() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat()
    heartbeat.arm()
    assert struct.unpack("3q", os.pread(heartbeat.fd, NUM_BYTES, 0)) == (1, 0, 1)
    heartbeat.wait()
    assert struct.unpack("3q", os.pread(heartbeat.fd, NUM_BYTES, 0)) == (1, 1, 1)
