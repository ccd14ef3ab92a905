"""An accelerator made of host memory, `hostgpu`, on which the engine runs as on a GPU."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
_BUILD = """
from torch.utils.cpp_extension import load
import sys
load("_hostgpu", [sys.argv[1]], build_directory=sys.argv[2], extra_cflags=["-O1", "-g0"])
"""


def surroundings(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process, with those by which its torch has `hostgpu`; builds it if need be."""
    folders = [str(built()), str(HERE), variables.get("PYTHONPATH", "")]
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def built() -> Path:
    """The folder of the extension; it is compiled once for each source and torch (15 seconds)."""
    source = HERE / "hostgpu.cpp"
    facts = (source.read_text(), version("torch"), sys.version, sysconfig.get_platform())
    key = hashlib.sha256("".join(facts).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"lockstep-hostgpu-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder / "hostgpu_device-1.dist-info"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not about.exists():
            (folder / "lock").unlink(missing_ok=True)  # of a build that was killed
            subprocess.run(
                [sys.executable, "-c", _BUILD, str(source), str(folder)],
                check=True,
                capture_output=True,
            )
            about.mkdir()
            (about / "METADATA").write_text("Name: hostgpu_device\nVersion: 1\n")
            entry = "[torch.backends]\nhostgpu = hostgpu_device:autoload\n"
            (about / "entry_points.txt").write_text(entry)
    return folder
