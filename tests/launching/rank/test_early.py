"""Ctrl-C while a process starts: one line, exit code 130, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import slow

from lockstep.config import TrainConfig
from lockstep.errors import ConfigError
from lockstep.launching.rank import early
from lockstep.launching.rank.early import EarlyNotice, Interrupted, ending_at_interrupt, interrupts
from lockstep.launching.rank.process import StopRequest

STRUCK = "import os, signal\nos.kill(os.getpid(), signal.SIG{name})\n"


def start(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(folder)} | env, check=False,
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert early.NOTHING_SAVED in done.stderr


@pytest.mark.parametrize(
    ("library", "arguments"),
    [
        ("typer", "--help"),
        ("torch", "train digits"),
        slow("torch", "resume r"),
        ("torch", "eval r"),
        slow("torch", "export r out"),
        slow("torch", "verify digits"),
        slow("torch", "chaos digits"),
        slow("torch", "slurm digits"),
        slow("torch", "doctor"),
        ("numpy", "data ufs-synthetic d"),
        ("torch", "quantum export r"),
    ],
)
def test_while_the_command_is_imported(tmp_path: Path, library: str, arguments: str) -> None:
    (tmp_path / f"{library}.py").write_text(STRUCK.format(name="INT"))
    one_line(start(tmp_path, "-m", "lockstep", *arguments.split()))


def test_while_commands_of_a_recipe_are_imported(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, lockstep.systems.quantum as package\n"
        f"package.__path__.insert(0, {str(tmp_path)!r})\n"
        "sys.argv = ['lockstep', 'quantum', 'predict']\n"
        "from lockstep.__main__ import main\nmain()\n"
    )
    (tmp_path / "cli.py").write_text(STRUCK.format(name="INT"))
    one_line(start(tmp_path, "-c", code))


@pytest.mark.parametrize(
    "use",
    [
        "import lockstep as ls\nls.Task",
        "from lockstep import train",
        "from lockstep import *",
        "import lockstep\nimport torch",
    ],
)
def test_while_a_script_imports_the_library(tmp_path: Path, use: str) -> None:
    (tmp_path / "torch.py").write_text(STRUCK.format(name="INT"))
    script = f"print('loading')\n{use}\n"
    (tmp_path / "script.py").write_text(script)
    done = start(tmp_path, "script.py")
    one_line(done)
    assert done.stdout == "loading\n"


def test_between_import_and_training(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import lockstep as ls\n{STRUCK.format(name='INT')}ls.main(None)\n")
    done = start(tmp_path, "script.py")
    one_line(done)
    assert f"(in {script}:3)" in done.stderr


def test_other_errors_are_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("the dog ate it")
    except RuntimeError as error:
        early._say(type(error), error, error.__traceback__)
    assert "RuntimeError: the dog ate it" in capsys.readouterr().err


def test_errors_for_the_user_are_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        TrainConfig(learning_rate=0.1)  # type: ignore[call-arg]
    except ConfigError as error:
        with pytest.raises(SystemExit) as ended:
            early._say(type(error), error, error.__traceback__)
    error = capfd.readouterr().err
    assert ended.value.code == 2
    assert "error: TrainConfig: unknown key 'learning_rate'; did you mean lr? (in " in error
    assert error.count("\n") == 1


def test_a_command_is_interrupted_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted), interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_handler_of_ones_own_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with ending_at_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_notice_that_came_early_counts() -> None:
    before = signal.signal(signal.SIGUSR1, EarlyNotice())
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequest() as stop:
            assert stop.reason() == "preempted"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("env", "expected"), [({"OMPI_COMM_WORLD_RANK": "0"}, 0), ({}, -signal.SIGUSR1)]
)
def test_a_rank_takes_note_of_a_preemption(
    tmp_path: Path, env: dict[str, str], expected: int
) -> None:
    (tmp_path / "yaml.py").write_text(STRUCK.format(name="USR1") + "os._exit(0)\n")
    code = "import lockstep; lockstep.TrainConfig"
    assert start(tmp_path, "-c", code, **env).returncode == expected
