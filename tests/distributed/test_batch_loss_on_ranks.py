"""Losses over the whole batch: one SHA-256 on any ranks, through losses of ranks."""

from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import same
from tests.distributed.test_errors import refused

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

TASK = f"{Path(__file__).with_name('batch_loss_tasks.py')}:Redundancy"
CONFIG = (
    "batch_size=36", "num_microbatches=7", "steps=12", "clip_norm=1.0", "lr=0.01",
    "eval_every=4", "log_every=1", "checkpoint.every=5", "digest_every=2",
)  # fmt: skip
AGAIN = ("batch_loss.recompute=true",)


def test_losses_of_ranks_change_nothing_and_cost_no_step(train_on, reference, tmp_path):
    """Before outputs are gathered, and inside the second forward pass, which has the same bits."""
    faults = [
        PlannedFault(0, 2, "outputs", "raise"), PlannedFault(1, 4, "outputs"),
        PlannedFault(2, 8, "second_forward"),
    ]  # fmt: skip
    ended = train_on(tmp_path / "run", 3, *AGAIN, faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == 2
    assert not any(row["event"] == "Resumed" for row in rows)


def test_a_loss_that_becomes_another_one_on_each_rank_is_found(train_on, tmp_path):
    ended = train_on(tmp_path / "run", 2, target=TASK.replace("Redundancy", "Apart"))
    refused(ended, "step 5: Task.batch_loss gave another loss on other ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys"),
    [
        ("mpi", 2, ()),
        ("mpi", 3, ("sharding=optimizer", *AGAIN)),
        ("torchrun", 4, ()),
        ("local", 9, ()),  # two of them are spares
        ("local", 3, ("balance_every=2",)),
    ],
)
def test_any_ranks_give_the_bits_of_one_process(
    train_on, reference, tmp_path, launcher, num_ranks, keys
):
    slow = [PlannedFault(0, step, "compute", "slow", sleep_s=0.1) for step in range(12)]
    faults = slow if "balance_every=2" in keys else ()
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher, faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert any(row["event"] == "Rebalanced" for row in rows) == bool(faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "topk", "lowrank"])
def test_compressed_gradients_have_one_result_too(train_on, tmp_path, name):
    keys = (f"compression.name={name}", "compression.buddy=true")
    folders = [tmp_path / "one", tmp_path / "three"]
    assert train_on(folders[0], 1, *keys).returncode == 0
    ended = train_on(folders[1], 3, *keys, faults=[PlannedFault(1, 6, "outputs")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(folders[1], result(folders[0]))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
@pytest.mark.parametrize(
    "moment",
    ["forward", "outputs", "second_forward", "backward", "reduce", "optimizer", "committed"],
)
@pytest.mark.parametrize("kind", ["kill", "miss"])
def test_a_loss_at_any_moment_changes_nothing(
    train_on, reference, tmp_path, launcher, moment, kind
):
    faults = [PlannedFault(2, 3, moment), PlannedFault(0, 7, moment, kind)]
    ended = train_on(tmp_path / "run", 3, *AGAIN, launcher=launcher, faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
@pytest.mark.parametrize("moment", ["search", "outputs", "second_forward"])
def test_an_optimizer_that_evaluates_again_has_the_whole_batch(
    train_on, tmp_path, launcher, moment
):
    target = TASK.replace("Redundancy", "Searched")
    keys = (*AGAIN, "clip_norm=null")
    assert train_on(tmp_path / "one", 1, *keys, target=target).returncode == 0
    # At some later pass of a step, by a delay, and at its first one.
    faults = [PlannedFault(1, 3, moment, delay_s=0.005), PlannedFault(2, 6, moment)]
    ended = train_on(tmp_path / "run", 3, *keys, target=target, launcher=launcher, faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", result(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_replacements_join(train_on, tmp_path, launcher):
    long = (
        "batch_size=48",
        "num_microbatches=24",
        "steps=80",
        "eval_every=20",
        "data.drop_last=true",
    )
    assert train_on(tmp_path / "one", 1, *long).returncode == 0
    faults = [PlannedFault(1, 4, "outputs"), PlannedFault(2, 30, "second_forward")]
    more = (*AGAIN, "--replace", 3)
    ended = train_on(tmp_path / "run", 4, *long, *more, launcher=launcher, faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", result(tmp_path / "one"))
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert any(row["event"] == "Joined" and row["step"] > 0 for row in rows)
