"""The `mpi4py` backend agrees with gloo and with arithmetic on 1 to 4 ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest


@pytest.mark.parametrize(
    ("num_ranks", "how", "ending"),
    [
        pytest.param(1, "helper", "leave", marks=pytest.mark.slow),
        (2, "url", "leave"),
        pytest.param(3, "helper", "mixed", marks=pytest.mark.slow),
        pytest.param(4, "url", "destroy", marks=pytest.mark.slow),
    ],
)
def test_every_collective_dtype_and_operation(
    mpirun: Callable[..., CompletedProcess[str]], num_ranks: int, how: str, ending: str
) -> None:
    done = mpirun("conformance.py", num_ranks, how, ending)
    assert done.returncode == 0, done.stdout
    summary = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert summary["differences"] == []
    assert summary["cases"] > 1500
    assert summary["with_gloo"] > 300
