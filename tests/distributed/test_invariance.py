"""The final parameters, and all metrics, do not depend on who computed them."""

import json
import sys
from pathlib import Path

import pytest
from tests.conftest import run

sys.path.insert(0, str(Path(__file__).parent))
from matrix import CASES

MATRIX = Path(__file__).parent / "matrix.py"


def train_all(ranks, folder, launcher, num_ranks, *names):
    done = ranks(launcher, num_ranks, MATRIX, folder, *names)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    assert done.returncode == 0, done.stderr[-3000:]
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process without any launcher gets."""
    done = run([sys.executable, MATRIX, folder], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        pytest.param("mpi", 2, marks=pytest.mark.slow),
        pytest.param("mpi", 3, marks=pytest.mark.slow),
        pytest.param("mpi", 5, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 3, marks=pytest.mark.slow),
    ],
)
def test_same_bits_on_any_number_of_ranks(ranks, folder, alone, launcher, num_ranks):
    names = list(CASES) if launcher == "mpi" else ["user", "user-sharded", "sliced", "augment"]
    found = train_all(ranks, folder, launcher, num_ranks, *names)
    assert {n: found[n] for n in names} == {n: alone[n] for n in names}


def test_configs_that_must_differ_do(alone):
    hashes = [alone[name][0] for name in CASES]
    equal = {("user", "user-sharded"), ("groups", "groups-sharded"), ("plain", "recompute")}
    equal |= {
        ("teacher", "teacher-sharded"),
        ("augment", "augment-workers"),
        ("sliced", "sliced-sharded"),
    }
    for i, first in enumerate(CASES):
        for j, second in enumerate(CASES):
            if i < j:
                assert (hashes[i] == hashes[j]) == ((first, second) in equal), (first, second)


def test_early_stopping_ended_the_run_early(alone):
    assert alone["early-stopping"][1] < 40


def test_more_ranks_than_microbatches_leave_spares(ranks, tmp_path, alone):
    found = train_all(ranks, tmp_path, "mpi", 3, "one-microbatch")
    assert found["one-microbatch"] == alone["one-microbatch"]
