"""All-gathers among many ranks take some rounds of few messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lockstep.comm.ahead import doubling

SCRIPT = Path(__file__).parent / "launched" / "many_ranks.py"


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17, 100])
def test_doubling_brings_every_part_once_in_log2_rounds(size: int) -> None:
    rounds = [list(doubling(place, size)) for place in range(size)]
    known = [{place} for place in range(size)]
    assert {len(own) for own in rounds} == {ceil(log2(size))}
    for each in zip(*rounds, strict=True):
        given = [{p for part in one.given for p in part} for one in each]
        taken = [{p for part in one.taken for p in part} for one in each]
        for place, one in enumerate(each):
            assert given[place] <= known[place]
            assert each[one.source].to == place
            assert each[one.source].given == one.taken  # message by message
            assert not taken[place] & known[place]
        for place in range(size):
            known[place] |= taken[place]
    assert all(len(own) == size for own in known)


@pytest.mark.parametrize("launcher", [pytest.param("mpi", marks=pytest.mark.slow), "local"])
def test_many_ranks_gather_and_go_on_without_one_that_dies(
    ranks: Callable[..., CompletedProcess[str]], launcher: str
) -> None:
    done = ranks(launcher, 5, SCRIPT)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 1, 2, 3], done.stderr
    assert {line["size"] for line in lines} == {4}
