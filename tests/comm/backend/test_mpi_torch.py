"""The `mpi4py` backend: what torch builds on it, and agreement with gloo and with arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

SCRIPTS = Path(__file__).parents[1] / "launched"
Launch = Callable[..., "CompletedProcess[str]"]


def checks_of(script: str) -> list[str]:
    """The names of a script's checks, without running it."""
    return re.findall(r"^def (check_\w+)\(", (SCRIPTS / script).read_text(), re.MULTILINE)


def outcome(done: CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


@pytest.fixture(scope="session")
def training(mpirun: Launch) -> dict[str, str]:
    return outcome(mpirun("training.py", 2))


@pytest.fixture(scope="session")
def behaviour(mpirun: Launch) -> dict[str, str]:
    return outcome(mpirun("behaviour.py", 2, options=("--with-ft", "ulfm")))


@pytest.fixture(scope="session")
def mesh(mpirun: Launch) -> dict[str, str]:
    return outcome(mpirun("mesh.py", 4))


@pytest.mark.parametrize("check", checks_of("training.py"))
def test_training(training: dict[str, str], check: str) -> None:
    assert training[check] == ""


@pytest.mark.parametrize("check", checks_of("behaviour.py"))
def test_behaviour(behaviour: dict[str, str], check: str) -> None:
    assert behaviour[check] == ""


@pytest.mark.parametrize("check", checks_of("mesh.py"))
def test_mesh(mesh: dict[str, str], check: str) -> None:
    assert mesh[check] == ""


def reports(done: CompletedProcess[str]) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda report: report["was"])


def test_survivors_of_a_killed_rank_regroup(mpirun: Launch) -> None:
    done = mpirun("survive.py", 3, "regroup", options=("--with-ft", "ulfm"))
    assert reports(done) == [
        {"was": 0, "error": "failed", "rank": 0, "size": 2, "total": 2.0},
        {"was": 2, "error": "revoked", "rank": 1, "size": 2, "total": 2.0},
    ], done.stdout


@pytest.mark.slow
def test_ddp_says_what_failed_and_processes_end(mpirun: Launch) -> None:
    done = mpirun("survive.py", 3, "ddp", options=("--with-ft", "ulfm"))
    assert reports(done) == [{"was": 0, "named": True}, {"was": 2, "named": True}], done.stdout


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
