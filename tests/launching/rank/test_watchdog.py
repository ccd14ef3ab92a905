"""The watchdog ends processes that stand still, and no others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import environment

from lockstep.comm.call_records import read_calls

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from lockstep.comm.calls import CallRing
from lockstep.engine.runtime import Heartbeat
from lockstep.launching.rank.watchdog import Watchdog

def children():
    tasks = Path("/proc/self/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]

def stand_still():
    while True:
        time.sleep(0.01) if sys.argv[1] != "loop" else None

heartbeat = Heartbeat()
ring = CallRing()
group = ring.start(1, 3)
files = [Path("report.json"), ring.fd, Path("flight/ended"), Path("flight/waits"), "rank 1 on host"]
stays = sys.argv[1].startswith("leave")
with Watchdog(heartbeat.fd, 0.6, *files, stays=stays):
    ring.end(ring.begin(group, 0, (8, 24, -1)), is_done=True)
    print("up", flush=True)
    for _ in range(5):
        heartbeat.beat()
        time.sleep(0.05)
    if sys.argv[1] != "unarmed":
        heartbeat.arm()
    for name in ("SIGINT", "SIGTERM", "SIGKILL", "SIGSTOP") if "without" in sys.argv[1] else ():
        heartbeat.beat()
        [child] = children()
        os.kill(int(child), getattr(signal, name))
        time.sleep(0.4)
        assert (children() == [child]) == (name in ("SIGINT", "SIGTERM")), name
    if sys.argv[1] == "stop and lose the watchdog":
        [child] = children()
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -KILL {child}"])
    if sys.argv[1].startswith(("stop", "without")):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
    elif sys.argv[1] in ("sleep", "loop"):
        stand_still()
    elif sys.argv[1] == "waiting":
        heartbeat.wait()
        ring.begin(group, 3, (0, 0, -1))
        time.sleep(1)
        print(*os.listdir("flight"), flush=True)
        Path("flight/waits").rename("copy")
        Path("flight/waits").write_bytes(b"")
        time.sleep(1)
        heartbeat.go()
        time.sleep(0.3)
        print(*os.listdir("flight"), flush=True)
    elif sys.argv[1] == "slow":
        for _ in range(6):
            time.sleep(0.4)
            heartbeat.beat()
    elif sys.argv[1] == "unarmed":
        time.sleep(2)
    if stays:
        heartbeat.disarm()
if sys.argv[1] == "leave and stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif stays:
    time.sleep(1.5)
    first = children()
    with Watchdog(heartbeat.fd, 0.6, *files):
        assert len(first) == len(children()) == 1
    assert not children()
print("done", flush=True)
"""


def run(tmp_path: Path, what: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(),
    )
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    "what",
    [
        "stop",
        "stop and lose the watchdog",
        "without a watchdog stop",
        "leave and stop",
        pytest.param("sleep", marks=pytest.mark.slow),
        "loop",
    ],
)
def test_a_process_that_stands_still_is_killed(tmp_path: Path, what: str) -> None:
    done, _ = run(tmp_path, what)
    assert done.returncode == -signal.SIGKILL
    reason = json.loads((tmp_path / "report.json").read_text())["reason"]
    assert reason in done.stderr
    is_stopped = "stop" in what
    assert ("was stopped by a signal for 0.6 s" if is_stopped else "did nothing for") in reason
    if not is_stopped:
        assert "in stand_still" in reason
    log = read_calls(tmp_path / "flight" / "ended")
    assert (log.rank, log.size, [c.kind for c in log.calls]) == (1, 3, ["all_gather"])
    assert not (tmp_path / "flight" / "waits").exists()


def test_what_a_rank_waits_in_can_be_read_as_long_as_it_does(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "waiting")
    assert (done.returncode, done.stdout) == (0, "up\nwaits\n\ndone\n")
    log = read_calls(tmp_path / "copy")
    assert [call.kind for call in log.calls] == ["all_gather", "barrier"]
    assert log.stuck == log.calls[-1]
    # Once for a wait, and not for a wait that has just begun.
    assert done.stderr == (
        "rank 1 on host has waited for 0.6 s in one call: another rank, or its host, does not "
        "answer\n"
    )


@pytest.mark.parametrize(
    "what",
    ["unarmed", *(pytest.param(w, marks=pytest.mark.slow) for w in ("slow", "leave slowly"))],
)
def test_others_are_left_alone(tmp_path: Path, what: str) -> None:
    done, _ = run(tmp_path, what)
    assert (done.returncode, done.stdout) == (0, "up\ndone\n")
    assert not (tmp_path / "report.json").exists()
