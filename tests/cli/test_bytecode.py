"""Imports that meet bytecode that is cut off, or a file of the user's, name the file."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import run

pytestmark = pytest.mark.no_ranks

TASK = "import lockstep\nimport {name}\n\nclass Nothing(lockstep.Task): ...\n"
WRITES = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def test_no_bytecode_is_written_where_files_may_not_be_as_large(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(f"text = {'x' * 100_000!r}\n")
    script = "ulimit -f 20 && exec \"$0\" -c 'import lockstep, large'"
    argv = ["sh", "-c", script, sys.executable]
    # Else it would be Lockstep's own bytecode that is cut off.
    env = WRITES | {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    subprocess.run(argv, cwd=tmp_path, env=env, timeout=60, check=True)
    written = {path.name.split(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert "__init__" in written  # Lockstep's, the last one
    assert not written & {"large", "early", "host"}


def test_bytecode_that_is_cut_off_is_named(tmp_path: Path, here: Any) -> None:
    (tmp_path / "helper_cut.py").write_text("answer = 42\n")
    (tmp_path / "task.py").write_text(TASK.format(name="helper_cut"))
    cached = Path(importlib.util.cache_from_source(str(tmp_path / "helper_cut.py")))
    py_compile.compile(str(tmp_path / "helper_cut.py"))
    os.truncate(cached, 40)
    ended = here("config", "task.py:Nothing")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {cached}: ")
    assert "delete this file" in ended.stderr


def test_a_tasks_own_end_of_file_is_shown_as_it_is(tmp_path: Path, lockstep: Any) -> None:
    (tmp_path / "helper_eof.py").write_text("raise EOFError('no more data')\n")
    (tmp_path / "task.py").write_text(TASK.format(name="helper_eof"))
    ended = lockstep("config", "task.py:Nothing")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "EOFError: no more data"


def test_a_file_that_hides_a_package_is_named(tmp_path: Path, lockstep: Any) -> None:
    (tmp_path / "rich.py").write_text("")
    ended = lockstep("train", "digits", cold=True, PYTHONPATH=".")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {tmp_path / 'rich.py'}: is imported in place of")
    assert "out of PYTHONPATH" in ended.stderr


@pytest.mark.parametrize("launcher", ["local", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_pass_by_files_of_the_working_directory_that_hide_modules(
    tmp_path: Path, launcher: str
) -> None:
    for name in ("random", "queue", "copy", "torch"):
        (tmp_path / f"{name}.py").touch()
    # Not by `-m lockstep`, which looks into this folder itself.
    command = [Path(sys.executable).with_name("lockstep"), "train", "digits", "-n", "1"]
    argv = [*command, "--launcher", launcher, "steps=2", "eval_every=2"]
    ended = run(argv, tmp_path, cold=True)
    assert ended.returncode == 0, ended.stderr
    assert "completed" in ended.stdout


def test_a_file_of_the_working_directory_that_hides_torch_is_named(
    tmp_path: Path, lockstep: Any
) -> None:
    (tmp_path / "torch.py").touch()
    ended = lockstep("train", "digits", cold=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {tmp_path / 'torch.py'}: is imported in place of")


def test_an_import_error_of_a_tasks_own_modules_is_shown_as_it_is(
    tmp_path: Path, lockstep: Any
) -> None:
    (tmp_path / "helper_of_task.py").write_text("")
    (tmp_path / "task.py").write_text("from helper_of_task import nothing\n")
    ended = lockstep("config", "task.py:Nothing", PYTHONPATH=".")
    assert "is imported in place of" not in ended.stderr
    assert "cannot import name 'nothing' from 'helper_of_task'" in ended.stderr
