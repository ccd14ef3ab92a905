"""What a user sees of a run: in a terminal of 80 columns, and through a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from tests.conftest import environment, result, slow, target

from lockstep.launching.job.commands import mpirun_command
from lockstep.observe.showing.terminal import stdout_console

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHORT = ("steps=6", "eval_every=2")


@pytest.mark.parametrize("launcher", [slow("python"), "local", slow("mpi"), slow("torchrun")])
def test_a_pipe_gets_plain_lines_of_at_most_80_columns(lockstep, tmp_path, launcher):
    ranks = "1" if launcher == "python" else "2"
    done = lockstep(
        "train", "digits", "-n", ranks, "--launcher", launcher, "--run-dir", "r", *SHORT,
        COLUMNS="80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)
    lines = [line for line in done.stdout.splitlines() if "warning" not in line]
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if re.search(r"step \d: .*val: accuracy", line)]) == 3
    assert f"SHA-256     {result(tmp_path / 'r')['params_sha256']}" in lines


@pytest.mark.parametrize("size", [{"COLUMNS": "0", "LINES": "0"}, {"COLUMNS": "", "LINES": "x"}])
def test_a_size_that_is_none_hides_nothing(lockstep, tmp_path, size):
    done = lockstep("runs", "--help", **size)
    assert done.returncode == 0
    assert "Usage" in done.stdout
    done = lockstep("train", target(), "--run-dir", "r", *SHORT, **size)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "r")["params_sha256"] in done.stdout


def test_a_console_of_a_script_has_columns_too(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "00")
    assert min(stdout_console().size) > 0


@pytest.fixture
def terminal(tmp_path):
    """Runs the `lockstep` command in a terminal of 80 columns; its exit code and what it shows."""

    def call(*arguments, interrupt_at=None):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = environment() | {"TERM": "xterm-256color"}
        del env["COLUMNS"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *arguments],
            stdin=follower, stdout=follower, stderr=follower, cwd=tmp_path, env=env,
        )  # fmt: skip
        os.close(follower)
        shown, deadline = b"", time.monotonic() + 120
        while block := _read(leader):
            shown += block
            if interrupt_at and interrupt_at in shown:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
            assert time.monotonic() < deadline
        os.close(leader)
        return process.wait(30), shown.decode()

    return call


def _read(leader):
    try:
        return os.read(leader, 4096)
    except OSError:  # Linux says so that the other end has been closed
        return b""


@pytest.mark.parametrize("ranks", [slow("1"), "2"])
def test_after_an_interrupt_in_a_terminal_the_run_can_be_resumed_as_it_says(
    terminal, here, tmp_path, ranks
):
    code, shown = terminal(
        "train", "digits", "-n", ranks, "--run-dir", "my run", "epochs=500",
        interrupt_at=b"val at ",
    )  # fmt: skip
    assert code == 130
    plain = ESCAPES.sub("\n", shown).replace("\r", "\n").splitlines()
    assert max(map(len, plain)) <= 80
    assert "go on with  lockstep resume 'my run'" in plain
    assert any(line.endswith(result(tmp_path / "my run")["params_sha256"]) for line in plain)
    waiting = "starting 2 ranks (mpi)" if ranks == "2" else "preparing the run"
    assert any(waiting in line for line in plain), "a spinner until there is something to show"
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l"), "the cursor is back"
    step = result(tmp_path / "my run")["step"]
    done = here("resume", "my run", f"stop_at_step={step + 1}")
    assert done.returncode == 0, done.stderr
    assert f"going on from step {step:,}" in done.stdout


def test_quiet_has_no_spinner_and_no_bar(terminal):
    code, shown = terminal("train", target(), "-q", "steps=2")
    assert code == 0
    assert "\x1b[?25l" not in shown
    assert "epoch" not in shown
    assert re.search(r"completed at step 2, SHA-256 [0-9a-f]{64}, runs/", " ".join(shown.split()))


@pytest.mark.slow
def test_verify_fits_a_pipe_of_80_columns(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("verify", target(), "--ranks", "1,2", "--launchers", "local", "steps=2")
    whole = here(*arguments).stdout.splitlines()
    assert max(map(len, whole)) <= 80
    quiet = here(*arguments, "-q").stdout.splitlines()
    assert quiet == whole[-2:]
    assert quiet[0] == "equal: 3 runs, one SHA-256, and the same metrics in 1 evaluation"
    assert len(quiet[1]) == 64


LOUD = """
import sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep as ls

class Loud(ls.Task):
    class Config(ls.TrainConfig):
        batch_size: int = 8
        num_microbatches: int = 2
        steps: int = 60
        log_every: int = 1
    def build_model(self): return nn.Linear(4, 2)
    def dataset(self, split):
        return TensorDataset(torch.ones(8, 4), torch.zeros(8).long()) if split == "train" else None
    def loss(self, model, batch):
        for _ in range(10):
            print("out " + "x" * 1000, flush=True)
            print("err " + "x" * 1000, file=sys.stderr, flush=True)
        time.sleep(0.01)
        return ls.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

if __name__ == "__main__":
    ls.main(Loud(), Loud.Config(hang_timeout_s=1), run_dir="run")
"""


@pytest.mark.parametrize(
    "launcher",
    ["local", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mpi", "mpirun", "torchrun"))],
)
def test_ranks_train_to_the_end_while_nobody_reads_what_they_print(tmp_path, launcher):
    (tmp_path / "loud.py").write_text(LOUD)
    command = [sys.executable, "-m", "lockstep", "train", "loud.py:Loud", "hang_timeout_s=1"]
    command += ["--run-dir", "run", "-n", "2", "--launcher", launcher]
    if launcher == "mpirun":  # by hand
        command = [*mpirun_command(2, [sys.executable, "loud.py"], cores=1).argv]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    printed, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    done = result(tmp_path / "run")
    assert (done["status"], done["world_size"]) == ("completed", 2)
    own = sum(line.startswith(b"out ") for line in printed.splitlines())
    assert own >= 1200, "the buffer holds all of it"
    assert b"were dropped" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["2"])
def test_ranks_train_to_the_end_on_a_terminal_that_is_held(tmp_path, ranks):
    (tmp_path / "loud.py").write_text(LOUD)
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", "loud.py:Loud", "hang_timeout_s=1",
         "--run-dir", "run", "-n", ranks, "--launcher", "local"],
        cwd=tmp_path, env=environment() | {"TERM": "xterm-256color"},
        stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shown = b""
    while block := _read(leader):
        shown += block
    os.close(leader)
    assert process.wait(30) == 0
    assert b"SHA-256" in shown, "what was held is shown once the terminal goes on"
