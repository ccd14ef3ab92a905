"""The final parameters, and all metrics, do not depend on who computed them."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import environment, run

from lockstep.launching.rank.join import free_port

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


FEW = (
    "plain", "user", "user-sharded", "sgd-momentum", "float64", "one-microbatch", "recompute",
    "early-stopping",
)  # fmt: skip
"""Those of the quick tests."""


def by_one_process(folder, *names):
    """What one process without any launcher gets."""
    folder.mkdir()
    done = run([sys.executable, MATRIX, folder, *names], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def alone(folder):
    return by_one_process(folder / "all")


@pytest.fixture(scope="module")
def few(folder):
    return by_one_process(folder / "few", *FEW)


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


@pytest.mark.parametrize("local", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_same_bits_where_each_rank_is_started_by_hand(tmp_path, few, local):
    """Whether or not ranks know their number on the host, nobody knows how many there are."""
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, MATRIX, tmp_path / "matrix", "plain"],
            env=environment(**there, RANK=rank, **({"LOCAL_RANK": rank} if local else {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    (out, error), (_, other_error) = (rank.communicate(timeout=60) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], error[-3000:] + other_error[-3000:]
    result = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert result["plain"] == few["plain"]


def check_all_differ(found):
    equal = {("user", "user-sharded"), ("groups", "groups-sharded"), ("plain", "recompute")}
    equal |= {
        ("teacher", "teacher-sharded"),
        ("augment", "augment-workers"),
        ("sliced", "sliced-sharded"),
    }
    for first, second in itertools.combinations(found, 2):
        is_equal = found[first][0] == found[second][0]
        assert is_equal == ((first, second) in equal), (first, second)


@pytest.mark.slow
def test_configs_that_must_differ_do(alone):
    assert [*alone] == [*CASES]
    check_all_differ(alone)


@pytest.mark.slow
def test_a_few_configs_that_must_differ_do(few):
    check_all_differ(few)


def test_early_stopping_ended_the_run_early(few):
    assert few["early-stopping"][1] < 40


def test_more_ranks_than_microbatches_leave_spares(ranks, tmp_path, few):
    found = train_all(ranks, tmp_path, "mpi", 3, "one-microbatch")
    assert found["one-microbatch"] == few["one-microbatch"]
