"""States over real ranks: one SHA-256, and what happens when a rank is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "split.py"
ROOT = str(Path(__file__).parents[4])

pytestmark = pytest.mark.slow


def test_split_states_have_one_result_and_survive_a_killed_rank(ranks) -> None:
    results = {}
    for size in (1, 2, 3, 4):
        done = ranks("mpi", size, SCRIPT, PYTHONPATH=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        results[size], *attempts = done.stdout.split()
        assert attempts == [str(size)]
    assert len(set(results.values())) == 1

    for killed in (0, 1, 2):
        done = ranks("mpi", 3, SCRIPT, killed, PYTHONPATH=ROOT)
        found, *attempts = done.stdout.split()
        assert attempts == ["3", "2"], done.stdout + done.stderr
        assert found == results[1]
