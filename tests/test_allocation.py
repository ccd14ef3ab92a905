"""Large tensors are asked for in large pages, unless the user has said otherwise."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource
import lockstep, lockstep.engine.run.loop
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(64 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGES = (64 << 20) // resource.getpagesize()


def page_faults(**env: str) -> int:
    """Of filling 64 MiB, in a program that has imported the whole engine before."""
    plain = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=plain | env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not HUGE.exists() or "[madvise]" not in HUGE.read_text(),
    reason="this system gives large pages to all programs, or to none",
)
@pytest.mark.slow
def test_large_tensors_are_in_large_pages_unless_the_user_says_otherwise() -> None:
    assert page_faults() < PAGES / 4
    assert page_faults(THP_MEM_ALLOC_ENABLE="0") > PAGES / 2
