"""A run on one host listens on loopback only, so that nobody else can reach it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launching.host.processes import children

LONG = ("steps=1000000", "checkpoint.every=1000000", "eval_every=1000000", "log_every=1")
LOOPBACK = ("0100007F", "00000000000000000000000001000000")
MPIRUN = ("prterun", "mpirun")


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for child in children(pid):
        yield from family(child)


def open_to_others(pid: int) -> list[str]:
    """The programs among a process's descendants that listen beyond loopback, or hear datagrams."""
    owners = {}
    for member in family(pid):
        for fd in Path(f"/proc/{member}/fd").iterdir():
            try:
                owners[os.readlink(fd)] = member
            except OSError:
                continue
    found = []
    for table, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if owner and fields[3] == listens and fields[1].split(":")[0] not in LOOPBACK:
                found.append(Path(os.readlink(f"/proc/{owner}/exe")).name)
    return found


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpi", marks=pytest.mark.slow),
        "local",
        pytest.param("torchrun", marks=pytest.mark.slow),
    ],
)
def test_nobody_else_can_connect(tmp_path: Path, launcher: str) -> None:
    argv = [sys.executable, "-m", "lockstep", "train", "digits", "-n", "2", "--run-dir", "run"]
    process = subprocess.Popen(
        [*argv, "--launcher", launcher, *LONG], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        events = tmp_path / "run" / "events.jsonl"
        deadline = time.monotonic() + 120
        while not (events.exists() and "StepDone" in events.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        # What mpirun itself listens on, none of its parameters changes.
        assert [name for name in open_to_others(process.pid) if name not in MPIRUN] == []
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
