"""Benchmarks still run: the engine may come to refuse what a script of theirs does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scaling", "checkpoint", "memory", "exchange"])
def test_a_case_runs_without_peers(case: str) -> None:
    argv = [sys.executable, str(RUN), "--quick", "--only", case]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "these numbers mean nothing" in done.stdout
    assert "\n## " in done.stdout
