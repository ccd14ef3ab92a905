"""Building the exported sources, as their CMakeLists.txt says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def built(sources: Path, build: Path, target: str, *options: str) -> Path:
    """The folder with what was built; the test is skipped where there is no compiler."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no cmake or no C++ compiler")
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    for command in (
        ["cmake", "-S", sources, "-B", build, python, *options],
        ["cmake", "--build", build, "--target", target, "-j", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build
