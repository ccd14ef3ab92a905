"""Small all-gathers in memory that ranks share: real processes, under every launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "launched" / "mailbox.py"

Ranks = Callable[..., CompletedProcess[str]]


def told(done: CompletedProcess[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    return sorted(found, key=lambda row: row["rank"])


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        ("mpi", 2),
        ("local", 3),
        pytest.param("mpi", 5, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_everyone_gets_what_all_have_said(ranks: Ranks, launcher: str, num_ranks: int) -> None:
    rows = told(ranks(launcher, num_ranks, SCRIPT, -1))
    assert [row["rank"] for row in rows] == list(range(num_ranks))
    for row in rows:
        assert row["why"] == ""
        assert row["wrong"] == []
        assert row["told"] == [[1999, num_ranks]] * num_ranks


@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [("mpi", 3), pytest.param("local", 3, marks=pytest.mark.slow)]
)
def test_those_who_wait_for_a_dead_rank_regroup(
    ranks: Ranks, launcher: str, num_ranks: int
) -> None:
    rows = told(ranks(launcher, num_ranks, SCRIPT, 1))
    assert len(rows) == num_ranks - 1
    for row in rows:
        assert row["why"] == ""
        assert row["wrong"] == []
        assert row["told"] == [[1234, num_ranks - 1]] * (num_ranks - 1)
