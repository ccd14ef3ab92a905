"""At the end the test split is evaluated with the parameters of the best checkpoint."""

from __future__ import annotations

import shutil

import pytest
from tests.conftest import result, slow

from lockstep.engine.checkpoint import listing
from lockstep.engine.faults import PlannedFault, to_env

LAST = 24
CONFIG = (
    f"steps={LAST}", "eval_every=4", "model=cnn", "lr=0.01", "watch=loss", "watch_mode=max",
    "checkpoint.every=4",  # so the "best" loss is an early one
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A finished run of one process; all tests here work on copies of it."""
    folder = tmp_path_factory.mktemp("best")
    return folder / "run"


@pytest.fixture
def finished(here, reference, tmp_path):
    """A copy of a finished run whose best step is not its last one."""
    if not reference.exists():
        done = here("train", "digits", "--run-dir", str(reference), *CONFIG)
        assert done.returncode == 0, done.stderr
        step = result(reference)["test_step"]
        assert f"step {LAST}: test of step {step}: " not in done.stdout  # it is in the summary
        assert f"  (step {step})" in done.stdout
    shutil.copytree(reference, tmp_path / "run")
    return tmp_path / "run"


def of_test(run_dir):
    metrics = result(run_dir)["metrics"]
    return {name: value for name, value in metrics.items() if name.startswith("test/")}


def best_step(run_dir):
    return int(listing.read_hint(run_dir / "checkpoints", "best").name[5:])


def test_it_is_what_the_best_checkpoint_gives(here, finished):
    ended, before = result(finished), of_test(finished)
    assert ended["step"] == LAST
    assert ended["test_step"] == best_step(finished) < LAST
    told = here("eval", "run", "--checkpoint", "best").stdout.splitlines()
    values = {f"test/{line.split()[0]}": float(line.split()[1]) for line in told}
    assert values == pytest.approx(of_test(finished), rel=1e-5)
    last = here("eval", "run", "--checkpoint", "latest").stdout.splitlines()
    assert last != told
    done = here("resume", "run", "test_on=last")
    assert done.returncode == 0, done.stderr
    again = result(finished)
    assert again["params_sha256"] == ended["params_sha256"]
    assert again["test_step"] == LAST
    assert of_test(finished) != before


@pytest.mark.parametrize("overrides", [slow(()), ("optimizer.sharded=true",)])
def test_any_number_of_ranks_gives_the_same(here, finished, tmp_path, overrides):
    ended, before = result(finished), of_test(finished)
    done = here(
        "train", "digits", "-n", "3", "--launcher", "local", "--run-dir", "r", *CONFIG, *overrides
    )
    assert done.returncode == 0, done.stderr
    again = result(tmp_path / "r")
    for key in ("params_sha256", "test_step"):
        assert again[key] == ended[key]
    assert of_test(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("slot", "more"),
    [slow(0, ()), slow(1, ("--replace", "1")), slow(1, ("optimizer.sharded=true",))],
)
def test_a_rank_that_dies_meanwhile_changes_nothing(lockstep, finished, tmp_path, slot, more):
    ended, before = result(finished), of_test(finished)
    # The run is over, so this is the only evaluation of the session.
    faults = to_env([PlannedFault(slot, LAST, "evaluate")], tmp_path / "faults")
    done = lockstep("resume", "run", "-n", "3", "--launcher", "local", *more, **faults)
    assert done.returncode == 0, done.stderr
    assert "is lost" in done.stdout
    assert result(finished)["params_sha256"] == ended["params_sha256"]
    assert result(finished)["test_step"] == ended["test_step"]
    assert of_test(finished) == before


def test_without_the_best_checkpoint_it_is_the_last_step_with_a_warning(here, finished):
    ended = result(finished)
    shutil.rmtree(finished / "checkpoints" / listing.folder_name(best_step(finished)))
    done = here("resume", "run")
    assert done.returncode == 0, done.stderr
    assert f"the state of step {LAST} is evaluated, not the best one" in done.stdout
    again = result(finished)
    assert again["test_step"] == LAST
    assert again["params_sha256"] == ended["params_sha256"]
