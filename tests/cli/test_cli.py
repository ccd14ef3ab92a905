"""Habits of the command line: help, version, completion, quiet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from tests.conftest import result, run, slow, target

import lockstep as ls

COMMANDS = [
    "recipes", "config", "init", "train", "resume", "eval", "export", "verify", "chaos", "slurm",
    "doctor", "data", "data ufs-synthetic", "quantum", "quantum predict", "quantum draw",
    "quantum export", "sketch",
]  # fmt: skip


def test_the_version(here):
    done = here("--version")
    assert (done.returncode, done.stdout) == (0, f"lockstep {ls.__version__}\n")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_short_and_long_help(here, command):
    short, long = here(*command.split(), "-h"), here(*command.split(), "--help")
    assert (short.returncode, long.returncode) == (0, 0)
    assert short.stdout == long.stdout
    assert "Usage: " in short.stdout
    assert short.stderr == ""


@pytest.mark.parametrize(
    ("closed", "num_ranks"),
    [
        pytest.param("<&- >&- 2>&-", 1, marks=pytest.mark.slow),
        *(
            pytest.param(closed, num, marks=pytest.mark.slow)
            for closed in ("<&-", ">&-")
            for num in (1, 2)
        ),
        pytest.param("<&- >&- 2>&-", 2, marks=pytest.mark.slow),
    ],
)
def test_standard_files_that_are_closed(tmp_path, closed, num_ranks):
    argv = [sys.executable, "-m", "lockstep", "train", target(), "-n", str(num_ranks), "steps=2"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *argv, "--run-dir", tmp_path / "run"]
    done = run(shell, tmp_path, cold=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert result(tmp_path / "run")["status"] == "completed"


def test_standard_output_that_is_closed_under_a_script(tmp_path):
    (tmp_path / "script.py").write_text(
        "import lockstep as ls\nfrom lockstep.systems.digits.task import Digits\n"
        "if __name__ == '__main__':\n    ls.main(Digits(), Digits.Config(steps=2))\n"
    )
    done = run(["sh", "-c", f"exec {sys.executable} script.py >&-"], tmp_path, cold=True)
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert result(run_dir)["status"] == "completed"


@pytest.mark.parametrize("group", ["", "data", "quantum"])
def test_a_group_alone_prints_its_help(here, group):
    done = here(*group.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Commands" if group else "─ Start ─") in done.stdout


def test_help_names_all_commands(here):
    shown = here("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"\b{command.split()[0]}\b", shown), command


@pytest.mark.parametrize("arguments", [["trian"], ["quantum", "predikt"], ["--verion"]])
def test_what_is_no_command(here, arguments):
    done = here(*arguments)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lockstep tr", {"train"}),
        (
            "lockstep quantum ",
            {"predict", "draw", "export", "plateau", "expressibility"},
        ),
    ],
)
def test_completion(tmp_path, words, expected):
    variables = {"_LOCKSTEP_COMPLETE": "complete_bash", "COMP_WORDS": words}
    variables["COMP_CWORD"] = str(words.count(" "))
    done = subprocess.run(
        [sys.executable, "-m", "lockstep"], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False, env=os.environ | variables,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected, done.stderr


def errors(done):
    """Standard output without warnings, such as that of idle cores."""
    return [line for line in done.stdout.splitlines() if "warning: " not in line]


@pytest.mark.parametrize("num_ranks", ["1", slow("2")])
def test_quiet_is_one_line(lockstep, tmp_path, num_ranks):
    arguments = ("-n", num_ranks, "--quiet", "--per-rank", "steps=4", "log_every=2")
    done = lockstep("train", target(), "--run-dir", "r", "stop_at_step=2", *arguments)
    assert done.returncode == 0, done.stderr
    stopped = result(tmp_path / "r")
    expected = f"stopped at step 2, SHA-256 {stopped['params_sha256']}, r"
    assert errors(done) == [expected]
    done = lockstep("resume", "r", "-q", "-n", num_ranks)
    assert done.returncode == 0, done.stderr
    finished = result(tmp_path / "r")
    expected = f"completed at step 4, SHA-256 {finished['params_sha256']}, r"
    assert errors(done) == [expected]


@pytest.mark.parametrize("num_ranks", [slow("1"), "2"])
def test_what_each_rank_does_is_shown_on_demand(lockstep, num_ranks):
    spent = r"^step 2: rank (\d+): compute \d+%  exchange \d+%  data \d+%  checkpoint \d+%"
    if num_ranks == "2":
        spent += r"  sent \d+\.\d KiB  received \d+\.\d KiB  in \d+ calls"
        spent += r"  gradient \d+\.\d+, of all \d+\.\d+"
    spent += "$"
    arguments = ("-n", num_ranks, "--per-rank", "steps=4", "log_every=2")
    done = lockstep("train", target(), "--run-dir", "r", "stop_at_step=2", *arguments)
    assert done.returncode == 0, done.stderr
    shown = re.findall(spent, done.stdout, re.MULTILINE)
    assert shown == [str(rank) for rank in range(int(num_ranks))]
    done = lockstep("resume", "r", "-n", num_ranks, "--per-rank")
    assert "step 4: rank 0: compute" in done.stdout, done.stderr


def test_quiet_still_tells_of_warnings_and_errors(lockstep):
    done = lockstep("train", target(), "steps=4", "num_microbatches=1", "-q", "-n", "2")
    assert "warning: " in done.stdout
    assert "spare" in done.stdout
    done = lockstep("train", target(), "steps=4", "evil=shape", "-q")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert errors(done) == []


def test_signals_that_a_parent_has_ignored_or_blocked_are_heard(here):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some services start programs
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        assert here("recipes").returncode == 0
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL  # keeps exit codes of children
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.slow
def test_an_interpreter_that_is_to_stay_shows_no_exit_code_as_a_traceback(tmp_path):
    argv = [sys.executable, "-m", "lockstep", "train", "nothing"]
    env = os.environ | {"PYTHONINSPECT": "1"}
    done = subprocess.run(
        argv, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown recipe 'nothing'")
    assert "Traceback" not in done.stderr
