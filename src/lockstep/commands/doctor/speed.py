"""The checks of `lockstep doctor` that tell how fast this machine is; slow is not wrong."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from lockstep.commands.doctor.check import Check

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
    """Bytes a second of a file that the kernel was told to forget."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
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
