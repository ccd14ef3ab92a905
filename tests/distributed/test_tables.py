"""Rows of tables are with their owners: the bits of one process, through losses and resumes."""

from pathlib import Path

import pytest
import torch
from tests.conftest import result
from tests.distributed.conftest import same

import lockstep as ls
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TASKS = Path(__file__).with_name("table_tasks.py")
TASK = f"{TASKS}:Look"
STEPS = 18
CONFIG = (
    f"steps={STEPS}", "lr=0.05", "eval_every=6", "eval_batch_size=4", "log_every=1",
    "checkpoint.every=5", "digest_every=4", "clip_norm=1.0", "test_on=best",
)  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys"),
    [
        ("mpi", 3, ("tables.buddy=false",)),
        pytest.param("local", 2, ("sharding=gradients",), marks=pytest.mark.slow),
        pytest.param("torchrun", 4, (), marks=pytest.mark.slow),
        pytest.param("local", 7, ("data.num_workers=1",), marks=pytest.mark.slow),  # two are spares
        pytest.param("mpi", 3, ("sharding=optimizer",), marks=pytest.mark.slow),
    ],
)
def test_any_ranks_give_the_bits_of_one_process(
    train_on, reference, reference_dir, tmp_path, launcher, num_ranks, keys
):
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    for name in ("table_0.00000.safetensors", "table_1.00000.safetensors"):
        pair = [
            r / f"checkpoints/step_{STEPS:08}" / name for r in (tmp_path / "run", reference_dir)
        ]
        assert pair[0].read_bytes() == pair[1].read_bytes()


@pytest.mark.parametrize("launcher", ["local", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "faults",
    [
        [(1, 2, "lookup"), (0, 9, "rows_summed")],
        *(
            pytest.param(faults, marks=pytest.mark.slow)
            for faults in (
                [(0, 0, "rows")],
                [(2, 1, "rows_summed"), (1, 12, "reduce")],
                [(0, 7, "optimizer"), (2, 14, "committed")],
                [(1, 5, "checkpoint"), (0, 5, "checkpoint")],
                [(2, 6, "evaluate"), (0, 16, "forward")],
                [(1, 11, "lookup", "miss"), (2, 15, "rows", "miss")],
                [(1, 3, "forward", "raise"), (1, 11, "backward", "raise")],
                [(0, 4, "rows"), (2, 4, "regroup")],
            )
        ),
    ],
)
def test_no_row_is_lost_with_a_rank(train_on, reference, tmp_path, launcher, faults):
    planned = [PlannedFault(*fault) for fault in faults]
    ended = train_on(tmp_path / "run", 3, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert len({row["step"] for row in rows if row["event"] == "StepDone"}) == STEPS
    both = "regroup" in str(faults)  # a rank and the one that held its rows too
    assert both or not any(row["event"] == "Resumed" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_without_copies_survivors_go_back_to_the_checkpoint(
    train_on, reference, tmp_path, launcher
):
    run_dir = tmp_path / "run"
    ended = train_on(
        run_dir, 3, "tables.buddy=false", launcher=launcher,
        faults=[PlannedFault(1, 13, "rows_summed"), PlannedFault(0, 17, "committed")],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)
    rows = read_events(run_dir / "events.jsonl")
    assert next(row["step"] for row in rows if row["event"] == "Resumed") in (10, 12)
    assert len({r["pid"] for r in rows if r["event"] == "Joined"}) == 3  # nobody was started again


@pytest.mark.slow
def test_three_ranks_go_on_with_what_two_have_saved(lockstep, train_on, reference, tmp_path):
    run_dir = tmp_path / "run"
    stopped = train_on(
        run_dir, 2, launcher="local", faults=[PlannedFault(0, 8, "committed", "preempt")]
    )
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    ended = lockstep("resume", run_dir, "-n", 3, "--launcher", "mpi", timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)


@pytest.mark.slow
def test_a_killed_rank_is_replaced(lockstep, reference, tmp_path):
    run_dir = tmp_path / "run"
    faults = [PlannedFault(1, 4, "rows"), PlannedFault(0, 10, "committed")]
    ended = lockstep(
        "train", TASK, "-n", 3, "--launcher", "local", "--replace", 2, "--run-dir", run_dir,
        *CONFIG, timeout=200, **to_env(faults, tmp_path / "faults"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "keys"),
    [("Some", ()), ("InPhases", ()), ("InBlocks", ("sharding=parameters",))],
)
def test_tables_go_with_everything_else(train_on, lockstep, tmp_path, task, keys):
    target = f"{TASKS}:{task}"
    one = lockstep("train", target, *CONFIG, "--run-dir", tmp_path / "one", timeout=150)
    assert one.returncode == 0, one.stdout + one.stderr
    ended = train_on(tmp_path / "run", 3, *keys, target=target, faults=[PlannedFault(1, 9, "rows")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", result(tmp_path / "one"))


def test_a_trained_table_is_loaded_and_evaluated(lockstep, reference_dir):
    loaded = ls.load(reference_dir, "latest")
    users = loaded.model.users.weight
    assert users.shape == (300, 8)
    assert torch.equal(loaded.model.users(torch.tensor([[3]])), users[3].view(1, 1, -1))
    ended = lockstep("eval", reference_dir, "--split", "val", "--checkpoint", "latest")
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("loss")]
    assert float(line.split()[1]) == pytest.approx(
        result(reference_dir)["metrics"]["val/loss"], rel=1e-5
    )


@pytest.mark.parametrize(
    ("task", "keys", "said"),
    [
        ("Look", ("evil=forgets",), "which Task.lookups has not named for this batch"),
        pytest.param(
            "Look",
            ("evil=name",),
            "Look.lookups: must return a dict with the keys ['items', 'users']",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Look", ("evil=range",), "Look.lookups: 'users': the numbers 3", marks=pytest.mark.slow
        ),
        pytest.param(
            "Look",
            ("evil=kind",),
            "Look.lookups: 'items': must be a tensor of integers, is torch.flo",
            marks=pytest.mark.slow,
        ),
        ("Look", ("evil=changes",), "Task.lookups: changes the carry, which it may only read"),
        pytest.param(
            "Look",
            ("evil=draws",),
            "task.generator: is changed by every microbatch",
            marks=pytest.mark.slow,
        ),
        ("Silent", (), "Silent.lookups: is missing; the model has a SparseEmbedding ('items')"),
        pytest.param(
            "Bare",
            (),
            "the model has no parameter to train; rows of a SparseEmbedding are none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "After", (), "the rows are with their ranks while a run goes on", marks=pytest.mark.slow
        ),
        ("Look", ("evil=evaluates",), "a batch that cannot be evaluated"),
        pytest.param(
            "InBlocks",
            ("evil=evaluates", "sharding=parameters"),
            "a batch that cannot be evaluated",
            marks=pytest.mark.slow,
        ),
        ("Look", ("evil=infinite",), "not the gradient of users"),
    ],
)
def test_what_goes_wrong_is_said(train_on, tmp_path, task, keys, said):
    ended = train_on(tmp_path / "run", 2, *keys, target=f"{TASKS}:{task}")
    text = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode in (1, 2)
    assert said in text
