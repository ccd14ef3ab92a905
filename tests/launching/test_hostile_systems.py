"""Ranks start without a home, a temporary folder and shared memory, or it is said why not."""

import subprocess
import sys

import pytest
from tests.conftest import environment, result


def trained(tmp_path, setup, *arguments, wrapper=()):
    """`lockstep train` after some shell commands."""
    argv = [sys.executable, "-m", "lockstep", "train", "digits", "steps=2", "--run-dir", "run"]
    return subprocess.run(
        [*wrapper, "sh", "-c", f'{setup} && exec "$@"', "sh", *argv, *arguments],
        cwd=tmp_path, env=environment(cold=True), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_mpi_starts_without_home_temporary_folder_and_shared_memory(tmp_path):
    wrapper = ["unshare", "--mount"]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if subprocess.run([*wrapper, "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    setup = f"{mount} && unset HOME && export TMPDIR=/nonexistent"
    ended = trained(tmp_path, setup, "-n", "2", "--launcher", "mpi", wrapper=wrapper)
    assert ended.returncode == 0, ended.stderr
    assert result(tmp_path / "run")["status"] == "completed"


def test_a_refusal_is_one_message_and_leaves_nothing(tmp_path):
    ended = trained(tmp_path, "ulimit -n 16", "-n", "2", "--launcher", "local")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: at most 16 files may be open")
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_start_where_only_the_soft_limit_on_open_files_is_low(tmp_path):
    ended = trained(tmp_path, "ulimit -Sn 12", "-n", "2", "--launcher", "local")
    assert ended.returncode == 0, ended.stderr
    assert result(tmp_path / "run")["status"] == "completed"


def test_exit_codes_tell_where_nothing_can_be_written(tmp_path):
    nowhere = "unset PYTHONUNBUFFERED && exec >/dev/full 2>&1"
    assert trained(tmp_path, nowhere, "-n", "0").returncode == 2
    assert trained(tmp_path, nowhere).returncode == 0
    assert result(tmp_path / "run")["status"] == "completed"
