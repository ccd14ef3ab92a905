"""Installs what tests need of Debian's packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def install(programs: Sequence[str], packages: Sequence[str]) -> str:
    """Install packages if a program is missing: why that is impossible, or nothing."""
    if not _missing(programs):
        return ""
    lock = Path(tempfile.gettempdir()) / f"lockstep-tests-apt.{os.getuid()}"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run beside others: apt waits for nobody
        missing = _missing(programs)
        if not missing:
            return ""
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            return f"no {', '.join(missing)}; needs root and apt-get to install {packages}"
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-qq", *command], env=env, capture_output=True, text=True
            )
            if done.returncode:
                return f"apt-get {command[0]} failed: {done.stderr.strip()[-500:]}"
    missing = _missing(programs)
    return f"no {', '.join(missing)} in {packages}" if missing else ""


def find(program: str) -> str | None:
    """Where a program is; daemons are in folders that a user's PATH does not have."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _missing(programs: Sequence[str]) -> list[str]:
    return [name for name in programs if find(name) is None]
