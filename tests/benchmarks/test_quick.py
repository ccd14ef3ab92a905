"""Benchmarks still run: the engine may come to refuse what a script of theirs does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scaling", "checkpoint", "memory", "exchange"])
def test_a_case_runs_without_peers(case: str) -> None:
    page = printed("run.py", "--only", case)
    assert "these numbers mean nothing" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script",
    [
        "baselines.py", "guards.py", "hrm_arc.py", "hrm_maze.py", "hrm_sudoku.py",
        "quantum_phases.py", "quantum_words.py", "sketched_accuracy.py", "ufs_noisy.py",
    ],
)  # fmt: skip
def test_a_script_prints_its_table(script: str) -> None:
    assert "| --- |" in printed(script)


def printed(script: str, *arguments: str) -> str:
    """The page that a script prints where it only shows that everything runs."""
    argv = [sys.executable, str(SCRIPTS / script), "--quick", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "\n## " in done.stdout
    return done.stdout
