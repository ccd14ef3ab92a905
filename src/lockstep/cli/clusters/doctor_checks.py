"""The checks of `lockstep doctor` that need no ranks: this machine and this installation."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from lockstep.config.files import sync_folder
from lockstep.errors import LaunchError
from lockstep.launching.host.processes import thread_warnings, usable_cores
from lockstep.launching.job.preflight import (
    Obstacle,
    loopback,
    mpi_memory_folder,
    open_files,
    temporary_folder,
)
from lockstep.launching.rank.environment import detect


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: name of what was checked.
        status: `skip` where this machine has no such thing, which is fine.
        detail: description of what was found.
        fix: command or advice that fixes it; empty if nothing is to be done.
    """

    name: str
    status: Literal["ok", "fail", "skip"]
    detail: str
    fix: str = ""


def guarded(name: str, look: Callable[[], Check], fix: str = "") -> Check:
    """The check that `look` returns; a failed one, if it raises."""
    try:
        return look()
    except Exception as error:  # a doctor must survive what it finds
        return Check(name, "fail", f"{type(error).__name__}: {error}", fix)


_PACKAGES = ("numpy", "mpi4py", "pydantic", "pyyaml", "rich", "typer", "safetensors")
_EXTRAS = {
    "tensorboard": "tensorboard",
    "scikit-learn": "recipes",
    "netCDF4": "ufs",
    "matplotlib": "ufs",
}
_MIN_PYTHON = (3, 10)
_MIN_TORCH = (2, 11)
_RUN_BYTES = 256 << 20


def local_checks(ranks: int, run_dir: Path, env: Mapping[str, str]) -> list[Callable[[], Check]]:
    """The checks, each a function to call.

    Args:
        ranks: number of ranks that are to run here.
        run_dir: path of the folder in which they are to write.
        env: environment variables to check.
    """
    looks: dict[str, tuple[Callable[[], Check], str]] = {
        "python": (_python, ""),
        "torch": (_torch, "pip install --force-reinstall torch"),
        "packages": (_packages, "pip install --upgrade lockstep-train"),
        "environment": (partial(_environment, env), "unset the variable, or set all of its group"),
        "threads": (partial(_threads, ranks, env), ""),
        "shared memory": (
            lambda: shared_memory(ranks, Path("/dev/shm")),
            "make /dev/shm writable (mount -t tmpfs tmpfs /dev/shm)",
        ),
        "open files": (lambda: _needed("open files", open_files("mpi", ranks), _open_files()), ""),
        "temporary files": (_temporary_files, ""),
        "loopback": (lambda: _needed("loopback", loopback(), "processes reach each other"), ""),
        "run directory": (
            lambda: run_directory(run_dir),
            "choose a writable place with --run-dir, on a file system that can rename and fsync",
        ),
        "matrix product": (matrix_product, ""),
        "file reading": (lambda: file_reading(run_dir), "choose another --run-dir"),
        "slurm": (lambda: _slurm(env), "ask the administrator why slurmctld does not answer"),
    }
    looks |= {name: (partial(_extra, name), "") for name in _EXTRAS}
    return [partial(guarded, name, look, fix) for name, (look, fix) in looks.items()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _MIN_PYTHON:
        return Check("python", "fail", version, "install Python 3.10 or newer")
    return Check("python", "ok", f"{version} ({sys.executable})")


def _torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _MIN_TORCH:
        wanted = ".".join(map(str, _MIN_TORCH))
        return Check("torch", "fail", torch.__version__, f"pip install 'torch>={wanted}'")
    x = torch.arange(4.0, requires_grad=True)
    (x * x).sum().backward()  # type: ignore[no-untyped-call]
    if x.grad is None or x.grad.tolist() != [0.0, 2.0, 4.0, 6.0]:
        raise ValueError(f"the gradient of x*x at 0, 1, 2, 3 is {x.grad}")
    if not torch.distributed.is_available():
        return Check("torch", "fail", "built without distributed", "pip install torch")
    return Check("torch", "ok", torch.__version__)


def _packages() -> Check:
    installed, missing = [], []
    for package in _PACKAGES:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check(
            "packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Check("packages", "ok", ", ".join(installed))


def _environment(env: Mapping[str, str]) -> Check:
    place = detect(env)
    detail = f"launched by {place.launcher}, rank {place.rank} of {place.world_size}"
    return Check("environment", "ok", detail)


def _threads(ranks: int, env: Mapping[str, str]) -> Check:
    cores = usable_cores(env)
    detail = f"{cores} usable cores, torch would use {torch.get_num_threads()} threads"
    if preset := env.get("OMP_NUM_THREADS"):
        detail += f", OMP_NUM_THREADS={preset} (a run sets its own)"
    if ranks > cores:
        return Check("threads", "ok", f"{detail}; {thread_warnings(1, ranks, cores)[0]}")
    return Check("threads", "ok", detail)


def _needed(name: str, obstacle: Obstacle | None, detail: str) -> Check:
    """The check of a requirement for starting ranks."""
    if obstacle:
        return Check(name, "fail", obstacle.problem, obstacle.remedy)
    return Check(name, "ok", detail)


def _temporary_files() -> Check:
    obstacle = temporary_folder()
    return _needed("temporary files", obstacle, "" if obstacle else tempfile.gettempdir())


def _open_files() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at most"


def shared_memory(ranks: int, folder: Path) -> Check:
    """Whether ranks on this machine can pass messages through shared memory."""
    name = "shared memory"
    if not folder.is_dir():
        return Check(name, "skip", f"this system has no {folder}")
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            memory[:8] = b"lockstep"
        if file.read(8) != b"lockstep":
            raise ValueError(f"what was written to {folder} does not read back")
    detail = f"{folder} is writable, {_mib(shutil.disk_usage(folder).free)} free"
    try:
        other = mpi_memory_folder(ranks, {}, folder)
    except LaunchError as error:
        problem, _, remedy = str(error).partition("; ")
        return Check(name, "fail", problem, remedy)
    if other:
        detail += f": too little for {ranks} ranks over MPI, which will use {other}"
    return Check(name, "ok", detail)


def run_directory(run_dir: Path) -> Check:
    """Whether files can be made, synced to disk and renamed where a run would write."""
    folder = _existing(run_dir)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lockstep-doctor-") as scratch:
        old, new = Path(scratch, "old"), Path(scratch, "new")
        new.write_bytes(b"before")
        with old.open("wb") as file:
            file.write(b"after")
            file.flush()
            os.fsync(file.fileno())
        old.replace(new)
        sync_folder(Path(scratch))
        if new.read_bytes() != b"after" or old.exists():
            raise ValueError(f"a rename in {folder} did not replace the other file")
    free = shutil.disk_usage(folder).free
    detail = f"{folder} is writable, {_mib(free)} free"
    if free < _RUN_BYTES:
        fix = f"free at least {_mib(_RUN_BYTES)} for checkpoints, or choose another --run-dir"
        return Check("run directory", "fail", detail, fix)
    return Check("run directory", "ok", detail)


def _slurm(env: Mapping[str, str]) -> Check:
    missing = [tool for tool in ("sinfo", "sbatch", "srun") if shutil.which(tool) is None]
    job = f", in job {env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else ""
    if len(missing) == 3 and not job:
        return Check("slurm", "skip", "not installed here")
    if missing:
        fix = "install SLURM's client tools (slurm-client), or put them on the PATH"
        return Check("slurm", "fail", f"no {', '.join(missing)}{job}", fix)
    version = _sinfo("--version")
    if version.returncode and not job:
        return Check("slurm", "skip", f"installed, but not set up: {_last_line(version.stderr)}")
    state = _sinfo("--noheader")
    if state.returncode:
        fix = "ask the administrator why slurmctld does not answer"
        return Check("slurm", "fail", _last_line(state.stderr) + job, fix)
    return Check("slurm", "ok", version.stdout.strip() + job)


def _sinfo(option: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sinfo", option], capture_output=True, text=True, timeout=30)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _extra(package: str) -> Check:
    try:
        return Check(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        fix = f"pip install 'lockstep-train[{_EXTRAS[package]}]' to have it"
        return Check(package, "skip", "not installed", fix)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


_SIZE = 512
_FILE_BYTES = 32 << 20
_REPEATS = 3


def matrix_product() -> Check:
    """Floating-point operations a second of a float32 matrix product, with torch's threads."""
    one = torch.randn(_SIZE, _SIZE)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first starts threads
        started = time.perf_counter()
        one @ one
        seconds.append(time.perf_counter() - started)
    speed = 2 * _SIZE**3 / min(seconds) / 1e9
    threads = torch.get_num_threads()
    return Check("matrix product", "ok", f"{speed:.0f} GFLOP/s in float32 on {threads} thread(s)")


def file_reading(folder: Path) -> Check:
    """Bytes a second when reading a file that was dropped from the kernel's cache."""
    folder = _existing(folder)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(os.urandom(1 << 20) * (_FILE_BYTES >> 20))
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(1 << 20):
            pass
        seconds = time.perf_counter() - started
    return Check("file reading", "ok", f"{_FILE_BYTES / seconds / 1e6:,.0f} MB/s in {folder}")
