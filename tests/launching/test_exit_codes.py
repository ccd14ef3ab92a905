"""Each signal has its exit code, whatever the launcher, the number of ranks and the moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import environment, result, slow

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
REASONS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
LAUNCHERS = {
    "python": (),
    "local": ("-n", "2", "--launcher", "local"),
    "mpi": ("-n", "2", "--launcher", "mpi"),
}


def started(folder: Path, *more: str, cold: bool = False) -> "subprocess.Popen[str]":
    argv = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "digits",
        "steps=1000000",
        "--run-dir",
        "run",
    ]
    return subprocess.Popen(
        [*argv, *more],
        cwd=folder,
        env=environment(cold=cold, TERM="dumb"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def hears(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


def wait_for_a_step(folder: Path, process: "subprocess.Popen[str]") -> None:
    events = folder / "run" / "events.jsonl"
    while not (events.exists() and "StepDone" in events.read_text()):
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("launcher", "signum"),
    [
        ("python", signal.SIGHUP),
        ("local", signal.SIGTERM),
        ("mpi", signal.SIGHUP),
        *(
            pytest.param(launcher, signum, marks=pytest.mark.slow)
            for launcher in LAUNCHERS
            for signum in CODES
        ),
    ],
)
def test_a_signal_while_training_has_its_code(tmp_path, launcher, signum):
    process = started(tmp_path, *LAUNCHERS[launcher])
    wait_for_a_step(tmp_path, process)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == CODES[signum], out
    ended = result(tmp_path / "run")
    assert (ended["status"], ended["reason"]) == ("stopped", REASONS[signum])
    assert ended["exit_code"] == CODES[signum]


@pytest.mark.parametrize("launcher", ["python", "local"])
@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_signal_in_the_first_second_has_its_code_and_a_line(tmp_path, launcher, delay_s):
    for signum, code in CODES.items():
        process = started(tmp_path, *LAUNCHERS[launcher], cold=True)
        while not hears(process.pid, signal.SIGTERM):  # until then, the interpreter starts
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(signum)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == code, out
        assert "interrupted" in out or "stopped before the first step" in out
        assert "Traceback" not in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, slow(signal.SIGHUP)])
def test_a_second_signal_does_not_change_the_code(tmp_path, signum):
    process = started(tmp_path, *LAUNCHERS["mpi"])
    wait_for_a_step(tmp_path, process)
    process.send_signal(signum)
    time.sleep(0.02)
    if process.poll() is None:
        os.kill(process.pid, signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == CODES[signum], out
