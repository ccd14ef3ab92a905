"""A process's heartbeat uses a file only while a watchdog reads it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from lockstep.engine.runtime import NUM_BYTES, ON_DISK, Heartbeat

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


def test_a_call_of_other_ranks_does_not_end_the_wait_for_a_disk() -> None:
    heartbeat = Heartbeat()

    def waits_for() -> int:
        return int(struct.unpack("3q", os.pread(heartbeat.fd, NUM_BYTES, 0))[1])

    seen = []
    with heartbeat.on_disk():
        heartbeat.wait()
        seen.append(waits_for())
        heartbeat.go()
        seen.append(waits_for())
        with pytest.raises(OSError), heartbeat.on_disk():  # noqa: PT011
            raise OSError
        seen.append(waits_for())
        with heartbeat.in_user_code():
            seen.append(waits_for())
        seen.append(waits_for())
    assert [*seen, waits_for()] == [1, ON_DISK, ON_DISK, 0, ON_DISK, 0]
