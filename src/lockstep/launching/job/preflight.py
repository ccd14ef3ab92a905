"""What ranks need of the system, checked or provided before any of them is started.

Without these checks, launchers and libraries fail with an exit code, a traceback or minutes of
silence. All checks together take less than a millisecond.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LaunchError

_LOOPBACK = "127.0.0.1"

MPI_SEGMENT_BYTES = 16 << 20
"""Shared memory of a rank over Open MPI: its `btl_sm_segment_size`."""
_MPI_MEMORY = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
"""Variables by which users choose the folder of this memory themselves."""
SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = "/tmp"

# Least that works for 2 and for 6 ranks: 22 and 36 with `local`, 41 and 48 with MPI.
_FILES = {"local": (24, 4), "torchrun": (24, 4), "mpi": (40, 4)}
"""Open files of the process that starts ranks: a number, and more for each rank."""

ADDRESS_BYTES = 1 << 30
"""Least address space of a process that trains: torch alone takes most of it."""
_MEMORY = (
    (resource.RLIMIT_AS, "address space", "-v", ADDRESS_BYTES),
    (resource.RLIMIT_DATA, "data", "-d", 320 << 20),
)
"""Limits on memory: what they count, their option of `ulimit`, and the least that torch needs."""
_CPU_S = 20
"""Least processor time of a process that trains."""
_THREADS = 4
"""Threads that a process which trains starts at the least, with those of libraries."""

_MORE_PROCESSES = (
    "raise the limit on processes and threads (`ulimit -u`; in a container, `--pids-limit`), or "
    "end others"
)
_CONNECT_S = 1.0
_DEVICES = ("/dev/null", "/dev/urandom")
_OWN_TABLE = Path("/proc/self/stat")


@dataclass(frozen=True)
class Obstacle:
    """Something that keeps ranks from starting.

    Attributes:
        problem: what is wrong, with the value found.
        remedy: what the user can do about it.
    """

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


def check_system(launcher: str, num_ranks: int) -> None:
    """Refuse to start ranks on a system on which they would fail or hang.

    Args:
        launcher: name of the launcher that is to start them.
        num_ranks: number of ranks on this host.

    Raises:
        LaunchError: something is missing.
    """
    checks: list[Callable[[], Obstacle | None]] = [
        working_directory,
        processes,
        lambda: open_files(launcher, num_ranks),
        temporary_folder,
        loopback,
    ]
    if launcher == "mpi":
        checks.append(file_size)
    for check in checks:
        if obstacle := check():
            raise LaunchError(str(obstacle))


def working_directory() -> Obstacle | None:
    """Whether the working directory exists; without one, libraries cannot even be loaded."""
    try:
        os.getcwd()
    except OSError as error:
        return Obstacle(
            f"the working directory is gone or cannot be read ({error.strerror})",
            "change to another one, such as `cd ~`, and start again",
        )
    return None


def devices() -> Obstacle | None:
    """Whether there are the devices without which torch cannot even be imported."""
    missing = next((path for path in _DEVICES if not os.path.exists(path)), None)
    if missing is None:
        return None
    return Obstacle(
        f"{missing} does not exist, and libraries need it",
        "give this system its devices: `mount -t devtmpfs dev /dev`",
    )


def address_space() -> Obstacle | None:
    """Whether a process may have as much memory as torch needs to be imported and to train."""
    for number, kind, option, needed in _MEMORY:
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY and soft < needed:
            return Obstacle(
                f"a process may have at most {soft >> 20:,} MiB of {kind} (ulimit {option}), and "
                f"torch needs {needed >> 20:,}",
                f"raise the limit with `ulimit {option} unlimited`",
            )
    return None


def processor_time() -> Obstacle | None:
    """Whether a process may compute for long enough to import torch and begin to train."""
    soft, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if soft == resource.RLIM_INFINITY or soft >= _CPU_S:
        return None
    return Obstacle(
        f"a process may compute for at most {soft} s (ulimit -t), and starts may take {_CPU_S} s",
        "raise the limit with `ulimit -t unlimited`",
    )


def threads() -> Obstacle | None:
    """Whether a process can start threads: OpenBLAS ends one that cannot, as Ctrl-C would.

    Tried, since several limits count them, together with processes of others.
    """
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return Obstacle(
            f"only {len(started)} more threads may be started, and torch needs {_THREADS}",
            _MORE_PROCESSES,
        )
    finally:
        end.set()
        for thread in started:
            thread.join()
    return None


def processes() -> Obstacle | None:
    """Whether the system shows its processes, as Linux does in /proc."""
    if sys.platform != "linux" or _OWN_TABLE.exists():
        return None
    return Obstacle(
        "/proc is not mounted, and launchers watch the ranks that they start there",
        "mount it with `mount -t proc proc /proc`",
    )


def open_files(launcher: str, num_ranks: int) -> Obstacle | None:
    """Whether enough files can be open; raises this process's own limit where that is allowed."""
    base, more = _FILES[launcher]
    needed = base + more * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return None
    return Obstacle(
        f"at most {hard} files may be open (ulimit -n), and {num_ranks} ranks with the launcher "
        f"{launcher} need {needed}",
        f"raise the limit with `ulimit -n {needed}` or more, or start fewer ranks",
    )


def temporary_folder() -> Obstacle | None:
    """Whether there is a folder for temporary files."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        return Obstacle(
            f"no folder for temporary files can be written ({error.strerror})",
            "set TMPDIR to one that can, and that has some space left",
        )
    return None


def loopback() -> Obstacle | None:
    """Whether processes of this host reach each other over IPv4's loopback interface."""
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_CONNECT_S),
        ):
            return None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return Obstacle(
            f"{_LOOPBACK} cannot be reached ({reason}), and ranks of a host meet there",
            f"bring the interface lo up with `ip link set lo up` and, if it lacks the address, "
            f"`ip address add {_LOOPBACK}/8 dev lo`; in a container, allow it a network",
        )


def file_size() -> Obstacle | None:
    """Whether files may be as large as the shared memory of a rank over MPI."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY or soft >= MPI_SEGMENT_BYTES:
        return None
    return Obstacle(
        f"files may have at most {soft:,} bytes (ulimit -f), and each rank over MPI needs one of "
        f"{MPI_SEGMENT_BYTES:,}",
        "raise the limit with `ulimit -f unlimited`, or use --launcher local",
    )


def mpi_memory_folder(
    num_ranks: int, env: Mapping[str, str], usual: Path = SHARED_MEMORY
) -> Path | None:
    """The folder for the shared memory of ranks over Open MPI; None leaves the choice to it.

    It would take /dev/shm, and abort the ranks without saying why where that has too little space:
    containers often have 64 MiB.

    Args:
        num_ranks: number of ranks on this host.
        env: environment variables of the ranks.
        usual: folder that Open MPI takes by itself.

    Raises:
        LaunchError: no folder has enough space left, or a variable names none that can be written.
    """
    for name in _MPI_MEMORY:
        if name in env and not os.access(env[name], os.W_OK):
            raise LaunchError(
                f"environment variable {name}={env[name]}: no folder that can be written; set it "
                "to one, or unset it"
            )
    if any(name in env for name in _MPI_MEMORY) or not usual.is_dir():
        return None
    if not os.access(usual, os.W_OK):  # Open MPI sees that too, and takes its own folder
        return None
    needed = num_ranks * MPI_SEGMENT_BYTES
    free = {usual: _left(usual, num_ranks)}
    if free[usual] >= needed:
        return None
    temporary = Path(tempfile.gettempdir())
    free[temporary] = _left(temporary, num_ranks)
    if free[temporary] >= needed:
        return temporary
    found = " and ".join(
        f"{folder} has {f'{size >> 20} MiB' if size else 'no space, or no inodes (`df -i`),'}"
        for folder, size in free.items()
    )
    raise LaunchError(
        f"{num_ranks} ranks over MPI need {needed >> 20} MiB of shared memory, but {found} left; "
        f"enlarge {usual} (`mount -o remount,size=1g {usual}`; in Docker: --shm-size=1g), set "
        "TMPDIR to a folder with more space, or use --launcher local"
    )


def _left(folder: Path, num_files: int) -> int:
    """Bytes that are left for so many new files; 0 where the file system takes fewer files."""
    there = os.statvfs(folder)
    has_room = not there.f_files or there.f_favail >= num_files  # some count no files
    return shutil.disk_usage(folder).free if has_room else 0


def missing_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that launchers cannot do without, where `env` lacks them or names what is unusable.

    mpirun wants HOME, which services, cron and `env -i` may leave out, and a TMPDIR that it can
    write; Python finds another folder by itself.
    """
    missing = {}
    if "HOME" not in env:
        home = os.path.expanduser("~")  # from the user database
        missing["HOME"] = home if os.path.isabs(home) else "/"
    folder = env.get("TMPDIR") or _TEMPORARY
    with contextlib.suppress(OSError):  # `temporary_folder` reports that
        if not _can_take_files(folder):
            missing["TMPDIR"] = tempfile.gettempdir()
    return missing


def _can_take_files(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free > 0


def resource_error(error: OSError) -> str:
    """The message for an error by which the system refuses a resource; empty for other errors."""
    remedies = {
        errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
        errno.ENFILE: "the system has no more open files to give; end other programs",
        errno.ENOSPC: "free some space",
        errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
        errno.EAGAIN: _MORE_PROCESSES,
    }
    remedy = remedies.get(error.errno or 0)
    if remedy is None:
        return ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; {remedy}"
