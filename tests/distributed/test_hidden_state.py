"""State that nobody has told of gives one SHA-256 on any number of ranks, or is refused by name."""

from pathlib import Path

import pytest
from tests.conftest import result, slow
from tests.distributed.test_errors import refused

TASKS = Path(__file__).with_name("state_tasks.py")


@pytest.fixture
def train(lockstep):
    def call(name, num_ranks, *more):
        arguments = ("train", f"{TASKS}:{name}", "-n", num_ranks, "--launcher", "local")
        return lockstep(*arguments, "--run-dir", f"{name}{num_ranks}", *more)

    return call


@pytest.mark.parametrize("keys", [(), ("mesh.pp=2",), slow(("sharding=optimizer",))])
def test_state_that_begins_late_is_refused_on_all_ranks(train, keys):
    ended = train("Late", 2, *keys)
    refused(ended, "gave another result when it was repeated", "scratch = ('task.")


def test_what_becomes_different_on_one_rank_is_refused_before_it_is_saved(train, tmp_path):
    refused(train("Parts", 2), "step 13: task.tag: has become different on different ranks")
    steps = {path.name for path in (tmp_path / "Parts2" / "checkpoints").glob("step_*")}
    assert steps == {"step_00000005", "step_00000010"}


def test_a_rank_may_look_on_at_its_model(train, tmp_path):
    ended = train("Watched", 2)
    assert ended.returncode == 0, ended.stderr
    assert "_hooks" not in ended.stdout
    assert result(tmp_path / "Watched2")["status"] == "completed"


def test_what_differs_from_the_start_is_a_warning(train, tmp_path):
    assert train("Apart", 1).returncode == 0
    ended = train("Apart", 2)
    assert ended.returncode == 0, ended.stderr
    assert (
        ended.stdout.count("task.tag, lockstep_user_state_tasks.RANK: differs between ranks") == 1
    )
    one, two = (result(tmp_path / f"Apart{n}")["params_sha256"] for n in (1, 2))
    assert one == two


def test_what_seems_a_cache_and_is_another_on_each_rank_is_a_warning(train, tmp_path):
    ended = train("Remembers", 2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("task.last: differs between ranks") == 1


def test_ranks_that_would_step_with_other_options_are_stopped(train):
    refused(train("OwnRate", 2), "'weight_decay' of the optimizer's group 0: is 0.1 on rank 0 but")


def test_ranks_that_would_take_other_samples_are_stopped(train):
    refused(train("OwnOrder", 2), "Task.epoch_indices gave other indices on other ranks")


@pytest.mark.parametrize("when", ["step", slow("evaluation")])
def test_a_hook_that_ends_the_run_on_some_ranks_only_is_refused(train, when):
    ended = train("StopsAlone", 2, f"tag={when}")
    refused(ended, "a hook ends the run on rank 1 ('enough') and on rank 0 for nothing")


@pytest.mark.slow
def test_caches_of_other_samples_on_each_rank_are_let_be(train, tmp_path):
    assert train("Caches", 1).returncode == 0
    ended = train("Caches", 3)
    assert ended.returncode == 0, ended.stderr
    assert "task.made" not in ended.stdout
    assert ended.stdout.count("differs between ranks") == 1  # a variable of the module
    one, three = (result(tmp_path / f"Caches{n}")["params_sha256"] for n in (1, 3))
    assert one == three
