"""What the numbers of a benchmark depend on."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.launching.host.processes import usable_cores
from lockstep.launching.job.commands import find_mpirun, mpi_version

PACKAGES = ("lockstep-train", "torch", "numpy", "mpi4py", "lightning", "accelerate")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "CPU": f"{cpu_model()}, {usable_cores()} core{'s' if usable_cores() > 1 else ''}",
        "load before": f"{os.getloadavg()[0]:.1f} processes (1 minute's mean)",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "MPI": _mpi(),
    }


def _mpi() -> str:
    """The version of MPI, which need not be there for cases without it."""
    try:
        return mpi_version(find_mpirun())
    except LockstepError:
        return "not installed"


def _version(package: str) -> str:
    """The version of a package; peers need not be there for cases without them."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
