"""Workers that step by themselves: one SHA-256 on any ranks, through losses and resumes."""

import sys
from pathlib import Path

import pytest
from tests.conftest import result, run
from tests.distributed.conftest import same

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

HERE = Path(__file__).parent
STEPS = 12
KEYS = (
    "digits", "model=cnn", "batch_size=120", "num_microbatches=5", "local.steps=3",
    f"steps={STEPS}", "clip_norm=1.0", "eval_every=6", "log_every=1", "checkpoint.every=5",
    "digest_every=4", "lr=0.005",
)  # fmt: skip
SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "local.outer_momentum=0")
THIN = ("compression.name=int8",)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process, by its keys; each is trained once."""
    known = {}

    def call(*more):
        if more not in known:
            folder = tmp_path_factory.mktemp("alone")
            argv = [sys.executable, "-m", "lockstep", "train", *KEYS, *more]
            ended = run([*argv, "--run-dir", "run"], folder)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            known[more] = result(folder / "run")
        return known[more]

    return call


@pytest.fixture
def train(lockstep, tmp_path):
    def call(num_ranks, *more, launcher="local", faults=()):
        run_dir = tmp_path / "run"
        ended = lockstep(
            "train", *KEYS, *more, "-n", num_ranks, "--launcher", launcher, "--run-dir", run_dir,
            timeout=200, **to_env(faults, tmp_path / "faults"),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return read_events(run_dir / "events.jsonl")

    return call


def test_losses_of_workers_change_nothing_and_cost_no_step(train, alone, tmp_path):
    faults = [PlannedFault(1, 4, "forward"), PlannedFault(0, 8, "reduced")]
    rows = train(3, faults=faults)
    same(tmp_path / "run", alone())
    assert alone()["carry_sha256"]
    assert sum(row["event"] == "RankLost" for row in rows) == 2
    assert not any(row["event"] == "Resumed" for row in rows)
    # The rate of the schedule, which workers step with; that of the outer optimizer is constant.
    rates = [row["lr"] for row in rows if row["event"] == "StepDone"]
    assert max(rates) <= 0.005
    assert len(set(rates)) > STEPS // 2


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "launcher"), [(2, "mpi"), (4, "torchrun"), (7, "local")])
@pytest.mark.parametrize("more", [(), SGD, THIN])
def test_any_ranks_give_the_bits_of_one_process(train, alone, tmp_path, more, num_ranks, launcher):
    """Fewer ranks than workers, and more."""
    train(num_ranks, *more, launcher=launcher)
    same(tmp_path / "run", alone(*more))


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["compute", "reduce", "copy", "copied", "optimizer", "committed"]
)
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_a_loss_at_any_moment_changes_nothing(train, alone, tmp_path, launcher, moment):
    rows = train(
        3, launcher=launcher, faults=[PlannedFault(2, 3, moment), PlannedFault(0, 7, moment)]
    )
    same(tmp_path / "run", alone())
    assert not any(row["event"] == "Resumed" for row in rows)


@pytest.mark.slow
def test_without_copies_survivors_go_back_to_the_checkpoint(train, alone, tmp_path):
    rows = train(3, "carry.buddy=false", faults=[PlannedFault(1, 8, "reduce")])
    same(tmp_path / "run", alone())
    assert [row["step"] for row in rows if row["event"] == "Resumed"] == [6]  # the best one so far


@pytest.mark.slow
def test_a_run_is_resumed_on_other_ranks(train, lockstep, alone, tmp_path):
    train(3, "stop_at_step=7")
    more = ("-n", 2, "--launcher", "mpi", "stop_at_step=null")
    ended = lockstep("resume", tmp_path / "run", *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", alone())


@pytest.mark.slow
def test_workers_move_to_faster_ranks(train, alone, tmp_path):
    slow = [PlannedFault(0, step, "compute", "slow", sleep_s=0.3) for step in range(STEPS)]
    rows = train(2, "balance_every=3", faults=slow)
    same(tmp_path / "run", alone())
    assert any(row["event"] == "Rebalanced" for row in rows)


@pytest.mark.slow
def test_replacements_get_what_workers_have(train, alone, tmp_path):
    long = ("steps=60", "checkpoint.every=30", "eval_every=30")
    faults = [PlannedFault(1, 4)]
    # So that there are still steps to do when another process has come.
    faults += [PlannedFault(2, step, "compute", "slow", sleep_s=0.2) for step in range(6, 58)]
    rows = train(3, *long, "--replace", 1, faults=faults)
    same(tmp_path / "run", alone(*long))
    assert any(row["event"] == "Joined" and row["step"] > 0 for row in rows)


@pytest.mark.slow
def test_one_worker_whose_steps_count_whole_trains_as_without(lockstep, tmp_path):
    """With an outer step of 1 and no momentum, exchanging every 4 steps is plain training.

    All of it within an epoch, at whose end batches are shorter.
    """
    about = (
        "digits", "dropout=0", "num_microbatches=1", "optimizer.name=sgd", "lr=0.1",
        "schedule.name=constant", "schedule.warmup_steps=0", "val_fraction=0.2",
    )  # fmt: skip
    local = ("local.steps=4", "local.outer_lr=1", "local.outer_momentum=0")
    found = []
    for name, more in {
        "local": ("batch_size=128", "steps=8", *local),
        "plain": ("batch_size=32", "steps=32"),
    }.items():
        ended = lockstep("train", *about, *more, "eval_every=1000", "--run-dir", name)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found.append(result(tmp_path / name)["metrics"])
    assert found[0]["val/loss"] == pytest.approx(found[1]["val/loss"], rel=1e-3)
    assert found[0]["val/accuracy"] > 0.8


@pytest.mark.slow
def test_half_precision_is_of_the_forward_passes(train, alone, tmp_path):
    train(2, "precision.dtype=bf16")
    same(tmp_path / "run", alone("precision.dtype=bf16"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("mesh.tp=2", "num_shards=2"), "mesh.tp=2, mesh.pp=1: with local.steps=3 a rank steps"),
        (("mesh.pp=2",), "mesh.tp=1, mesh.pp=2: with local.steps=3 a rank steps all"),
        (("sharding=optimizer",), "sharding=optimizer, optimizer.sharded=False: with local.steps"),
        (("optimizer.sharded=true",), "sharding=none, optimizer.sharded=True: with local.steps"),
        (("precision.dtype=fp16",), "precision.dtype=fp16: its loss scale is of the run's steps"),
        (("batch_size=14",), "local.steps=3: batch_size=14 is less than a sample for each step"),
        (("local.steps=0",), "local.steps=0: input should be greater than 0"),
        (("local.outer_momentum=1",), "local.outer_momentum=1: input should be less than 1"),
        (("local.outer_lr=-1",), "local.outer_lr=-1: input should be greater than or equal to 0"),
    ],
)
def test_what_does_not_go_together_is_refused(here, more, said):
    ended = here("train", *KEYS, *more)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("carry_tasks.py:Read", "local.steps=2: Read has a carry, and a worker carries"),
        ("carry_tasks.py:Read num_shards=2", "local.steps=2: Read has layers in shards (num_shar"),
        ("table_tasks.py:Look", "local.steps=2: Look has a SparseEmbedding, whose rows"),
        ("table_tasks.py:InBlocks", "local.steps=2: InBlocks has blocks (a lockstep.nn.Pipeline,"),
        ("../../examples/gan.py", "local.steps=2: Gan has phases, and a worker has one"),
    ],
)
def test_tasks_with_more_than_a_loss_are_refused(here, task, said):
    ended = here("train", *f"{HERE}/{task}".split(), "steps=2", "local.steps=2")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert said in " ".join((ended.stdout + ended.stderr).split())


def test_a_loss_that_is_not_finite_in_a_later_step_is_named(here):
    ended = here("train", *KEYS, *SGD, "lr=1e25")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    said = " ".join((ended.stdout + ended.stderr).split())
    assert "step 0: the loss is nan in microbatch 0 (rank 0), nan in microbatch 1" in said
