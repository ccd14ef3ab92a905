"""What the system lacks is said before a rank starts, in one message, or made up for."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.comm.calls import CallRing
from lockstep.errors import LaunchError
from lockstep.launching.job import preflight
from lockstep.launching.job.commands import (
    local_command,
    mpi_version,
    mpirun_command,
    rank_environment,
)

pytestmark = pytest.mark.no_ranks

LAUNCHERS = ("local", "mpi", "torchrun")
CHECK = """
import sys
from lockstep.errors import LaunchError
from lockstep.launching.job.preflight import check_system
try:
    check_system(sys.argv[1], 2)
except LaunchError as error:
    print(error)
"""


def said(setup: str, launcher: str, *wrapper: str) -> str:
    """What the checks say in a process of its own, after some shell commands."""
    script = f"{setup} && exec {sys.executable} -c '{CHECK}' {launcher}"
    argv = [*wrapper, "sh", "-c", script]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def network_namespaces() -> None:
    tried = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip("this user may not make network namespaces")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_too_few_open_files_are_refused(launcher: str) -> None:
    text = said("ulimit -n 12", launcher)
    assert "at most 12 files may be open" in text
    assert "ulimit -n" in text.partition(";")[2]


def test_a_soft_limit_on_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    chosen = []
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (12, hard))
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda _, limits: chosen.append(limits))
    assert preflight.open_files("mpi", 2) is None
    assert chosen == [(48, hard)]


def test_small_files_are_refused_over_mpi_only() -> None:
    assert "ulimit -f unlimited" in said("ulimit -f 1000", "mpi")
    assert said("ulimit -f 1000", "local") == ""


@pytest.mark.usefixtures("network_namespaces")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_loopback_interface_that_is_down_is_said_at_once(launcher: str) -> None:
    assert "ip link set lo up" in said("true", launcher, "unshare", "--net")


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ('mkdir gone && cd gone && rmdir "$PWD"', "the working directory is gone"),
        ("ulimit -f 0", "no folder for temporary files can be written"),
        ("ulimit -v 500000", "at most 488 MiB of address space (ulimit -v), and torch needs 1,024"),
        ("ulimit -d 200000", "at most 195 MiB of data (ulimit -d), and torch needs 320"),
        ("ulimit -t 10", "at most 10 s (ulimit -t), and starts may take 20 s; raise the limit"),
        ("export TORCH_LOGS=none+sense", "TORCH_LOGS='none+sense': torch cannot be imported; name"),
    ],
)
def test_what_keeps_torch_from_being_imported_is_one_message(
    tmp_path: Path, setup: str, words: str
) -> None:
    script = f"{setup} && exec {sys.executable} -m lockstep train digits"
    argv = ["sh", "-c", script]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_system_that_tells_nothing_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "_OWN_TABLE", tmp_path / "self")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(LaunchError, match="mount -t proc proc /proc"):
        local_command(2, ["true"])


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def gettempdir() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    with pytest.raises(LaunchError, match="set TMPDIR"):
        local_command(2, ["true"])


def test_ranks_get_a_home_and_a_temporary_folder_that_works(tmp_path: Path) -> None:
    env = rank_environment(1, {"TMPDIR": str(tmp_path / "none")})
    assert Path(env["HOME"]).is_absolute()
    assert env["TMPDIR"] == tempfile.gettempdir()
    kept = {"HOME": "/nowhere", "TMPDIR": str(tmp_path)}
    assert rank_environment(1, kept).items() >= kept.items()


def test_mpirun_tells_its_version_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    found = mpirun_command(2, ["true"], cores=2).argv[0]
    assert "Open MPI" in mpi_version(Path(found))


def test_what_mpirun_says_is_in_the_message(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match=r"no such library\n\(exit code 3\)"):
        mpi_version(program)


def free(monkeypatch: pytest.MonkeyPatch, **mib: int) -> None:
    """Let folders have some MiB left: those of shared memory, and all others."""
    names = {preflight.SHARED_MEMORY: "shared"}
    sizes = {name: SimpleNamespace(free=size << 20) for name, size in mib.items()}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: sizes[names.get(path, "other")])


def test_a_folder_for_memory_of_mpi_that_is_not_there() -> None:
    env = {"OMPI_MCA_btl_sm_backing_directory": "/nonexistent"}
    with pytest.raises(LaunchError, match=r"directory=/nonexistent: no folder that can be written"):
        preflight.mpi_memory_folder(2, env)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_mpi_takes_another_folder_where_shared_memory_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def flags() -> tuple[str, ...]:
        return mpirun_command(4, ["true"], cores=4, one_host=True).argv

    monkeypatch.delenv("OMPI_MCA_btl_sm_backing_directory", raising=False)
    free(monkeypatch, shared=64, other=100)
    assert "btl_sm_backing_directory" not in flags()
    free(monkeypatch, shared=63, other=100)
    at = flags().index("btl_sm_backing_directory")
    assert flags()[at + 1] == tempfile.gettempdir()
    free(monkeypatch, shared=64, other=100)
    files = {preflight.SHARED_MEMORY: 3}  # too few for 4 ranks
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_files=8, f_favail=files.get(path, 8))
    )
    assert "btl_sm_backing_directory" in flags()
    free(monkeypatch, shared=63, other=1)
    with pytest.raises(LaunchError, match=r"4 ranks over MPI need 64 MiB.*--shm-size=1g"):
        flags()


def test_devices_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.devices() is None
    monkeypatch.setattr(preflight, "_DEVICES", ("/dev/null", "/dev/nowhere"))
    assert "/dev/nowhere does not exist" in str(preflight.devices())


def test_a_record_of_calls_does_without_memory_that_it_may_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", refused)
    assert CallRing().fd == -1


def test_a_limit_on_threads_is_said_before_libraries_meet_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert preflight.threads() is None
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    obstacle = preflight.threads()
    assert obstacle is not None
    assert "only 2 more threads may be started" in obstacle.problem
    assert "ulimit -u" in obstacle.remedy
    assert not any(thread.is_alive() for thread in started)


def test_errors_of_limits_say_which_limit() -> None:
    error = OSError(errno.EMFILE, "Too many open files", "run/checkpoints")
    assert preflight.resource_error(error).startswith("run/checkpoints: Too many open files; raise")
    assert "ulimit -f" in preflight.resource_error(OSError(errno.EFBIG, "File too large"))
    assert preflight.resource_error(OSError(errno.EACCES, "Permission denied")) == ""
