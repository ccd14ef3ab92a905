"""Ranks of one host that read one another's memory: real processes, under every launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

NUM_LAYOUTS = 21
SCRIPT = Path(__file__).parent / "launched" / "shared_sums.py"

Ranks = Callable[..., CompletedProcess[str]]


def told(done: CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda row: row["rank"])


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        ("mpi", 2),
        pytest.param("local", 3, marks=pytest.mark.slow),
        pytest.param("mpi", 4, marks=pytest.mark.slow),
        pytest.param("mpi", 7, marks=pytest.mark.slow),  # more ranks than microbatches
        pytest.param("local", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_sums_in_shared_memory(ranks: Ranks, launcher: str, num_ranks: int) -> None:
    rows = told(ranks(launcher, num_ranks, SCRIPT, -1))
    assert [row["rank"] for row in rows] == list(range(num_ranks))
    for row in rows:
        assert row["why"] == ["", None]
        shared, sent = row["digests"]
        assert shared == sent == rows[0]["digests"][0]
        assert len(set(shared)) == 3
        # The same bytes are counted, and a byte to and from each of the others for each wait.
        waits = 2 * (num_ranks - 1)
        in_memory, in_messages = row["counts"]
        assert in_memory[0] <= in_messages[0]
        assert in_memory[1:] == [num_bytes + waits for num_bytes in in_messages[1:]]
        # Memory goes back when it is laid out again: there is that of one layout.
        assert [maps for maps, _ in row["kept"]] == [1, *[num_ranks] * 2] * (NUM_LAYOUTS // 3)
        # Descriptors: what a library opens meanwhile is little; one a layout would be more.
        descriptors = [num for _, num in row["kept"]]
        assert descriptors[-1] <= descriptors[2] + 1


@pytest.mark.parametrize(
    ("launcher", "lacking"), [("mpi", 1), pytest.param("local", 0, marks=pytest.mark.slow)]
)
def test_all_send_messages_if_one_has_no_memory_to_share(
    ranks: Ranks, launcher: str, lacking: int
) -> None:
    rows = told(ranks(launcher, 3, SCRIPT, lacking))
    for row in rows:
        assert row["why"] == [f"rank {lacking}: File too large", None]
        assert row["digests"][0] == row["digests"][1] == rows[0]["digests"][0]
        assert row["counts"][0] == row["counts"][1]
        assert [maps for maps, _ in row["kept"]][-1] <= 2
