"""Compressed gradients: one SHA-256 on any ranks, through losses and resumes, in fewer bytes."""

import statistics
import sys
from pathlib import Path

import pytest
from tests.conftest import result, run
from tests.distributed.conftest import same

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TABLES = Path(__file__).with_name("table_tasks.py")
READ = f"{Path(__file__).with_name('carry_tasks.py')}:Read"
TASKS = {
    # Batch norm; and microbatches with a carry of their own, some of them without samples.
    "digits": (
        "digits", "model=cnn", "batch_size=40", "num_microbatches=5", "steps=16", "clip_norm=1.0",
        "eval_every=8", "log_every=1", "checkpoint.every=5", "digest_every=4",
    ),
    "read": (
        READ, "steps=16", "lr=0.01", "eval_every=8", "eval_batch_size=20", "log_every=1",
        "checkpoint.every=5", "digest_every=4", "num_shards=2",
    ),
    # Tables whose rows travel as they are.
    "look": (
        f"{TABLES}:Look", "steps=16", "lr=0.05", "eval_every=6", "eval_batch_size=4", "log_every=1",
        "checkpoint.every=5", "digest_every=4", "clip_norm=1.0",
    ),
}  # fmt: skip
STEPS = 16
KINDS = {
    "int8": (),
    "int16": (),
    "topk": ("compression.ratio=0.05",),
    "randomk": ("compression.ratio=0.05",),
    "onebit": (),
    "lowrank": (),
    "int8, no feedback": ("compression.error_feedback=false",),
    "topk, no feedback": ("compression.error_feedback=false",),
    "lowrank, no feedback": ("compression.error_feedback=false", "compression.rank=1"),
}
BUDDY = "compression.buddy=true"


def keys(kind, task="digits"):
    return *TASKS[task], f"compression.name={kind.partition(',')[0]}", *KINDS[kind]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process, by task and kind; each is trained once."""
    known = {}

    def call(kind, task="digits", *more):
        if (kind, task, more) not in known:
            folder = tmp_path_factory.mktemp("alone")
            argv = [sys.executable, "-m", "lockstep", "train", *keys(kind, task), *more]
            ended = run([*argv, "--run-dir", "run"], folder)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            known[kind, task, more] = result(folder / "run")
        return known[kind, task, more]

    return call


@pytest.fixture
def train_kind(lockstep):
    def call(kind, run_dir, num_ranks, *more, task="digits", launcher="local", faults=()):
        ended = lockstep(
            "train", *keys(kind, task), "-n", num_ranks, "--launcher", launcher, "--run-dir",
            run_dir, *more, timeout=150, **to_env(faults, run_dir.with_suffix(".faults")),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return read_events(run_dir / "events.jsonl")

    return call


def sent_bytes(rows):
    """Bytes that rank 0 sends in a step, in the median: without those of checkpoints."""
    reports = [row for row in rows if row["event"] == "StepDone"]
    return statistics.median(row["ranks"][0]["sent_bytes"] / row["num_steps"] for row in reports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "launcher"),
    [
        (2, "mpi"),
        (3, "local"),
        (4, "torchrun"),
        (7, "local"),  # two of them are spares
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_ranks_give_the_bits_of_one_process(
    train_kind, alone, tmp_path, kind, num_ranks, launcher
):
    train_kind(kind, tmp_path / "run", num_ranks, launcher=launcher)
    same(tmp_path / "run", alone(kind))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["read", "look"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_keeps_its_own_carry_and_rows_beside(train_kind, alone, tmp_path, task, kind):
    faults = [PlannedFault(1, 9, "reduce")]
    train_kind(kind, tmp_path / "run", 3, BUDDY, task=task, launcher="mpi", faults=faults)
    same(tmp_path / "run", alone(kind, task))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "launcher"), [("digits", "local"), ("read", "mpi")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "faults",
    [
        [(1, 7, "reduce"), (0, 12, "copied")],
        [(0, 0, "compute"), (2, 9, "committed")],
        [(2, 8, "reduced"), (1, 9, "copy")],
        [(1, 5, "checkpoint"), (0, 13, "optimizer")],
    ],
)
def test_with_copies_a_loss_costs_no_step(
    train_kind, alone, tmp_path, kind, task, launcher, faults
):
    if "feedback" in kind or task == "read":
        faults = [fault for fault in faults if not fault[2].startswith("cop")]
    planned = [PlannedFault(*fault) for fault in faults]
    rows = train_kind(
        kind, tmp_path / "run", 3, BUDDY, task=task, launcher=launcher, faults=planned
    )
    same(tmp_path / "run", alone(kind, task))
    assert sum(row["event"] == "RankLost" for row in rows) == len(faults)
    assert not any(row["event"] == "Resumed" for row in rows)


@pytest.mark.parametrize(
    ("more", "goes_back"),
    [((BUDDY,), False), pytest.param((), True, marks=pytest.mark.slow)],
)
def test_losses_change_nothing(train_kind, alone, tmp_path, more, goes_back):
    """With copies the survivors go on, without they go back to the newest checkpoint."""
    faults = [PlannedFault(1, 7, "reduced"), PlannedFault(0, 12, "committed")]
    rows = train_kind("int8", tmp_path / "run", 3, *more, faults=faults)
    same(tmp_path / "run", alone("int8"))
    assert sum(row["event"] == "RankLost" for row in rows) == 2
    assert any(row["event"] == "Resumed" for row in rows) == goes_back


@pytest.mark.slow
def test_losses_between_the_sums_of_factors_change_nothing(train_kind, alone, tmp_path):
    faults = [PlannedFault(1, 7, "factors"), PlannedFault(0, 12, "factors", delay_s=0.002)]
    rows = train_kind("lowrank", tmp_path / "run", 3, BUDDY, faults=faults)
    same(tmp_path / "run", alone("lowrank"))
    assert sum(row["event"] == "RankLost" for row in rows) == 2
    assert not any(row["event"] == "Resumed" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
@pytest.mark.parametrize("kind", ["lowrank", "lowrank, no feedback"])
@pytest.mark.parametrize("delay_s", [0.0, 0.0002, 0.0005, 0.001, 0.002, 0.004])
def test_losses_at_any_time_of_the_second_sum_change_nothing(
    train_kind, alone, tmp_path, kind, launcher, delay_s
):
    """Some ranks may have what others lack: who is behind must not go on from old factors."""
    faults = [
        PlannedFault(2, 3, "factors", delay_s=delay_s),
        PlannedFault(1, 6, "factors", delay_s=delay_s),
    ]
    train_kind(kind, tmp_path / "run", 4, BUDDY, launcher=launcher, faults=faults)
    same(tmp_path / "run", alone(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_without_copies_survivors_go_back_to_the_checkpoint(
    train_kind, alone, tmp_path, kind, launcher
):
    faults = [PlannedFault(1, 13, "reduce")]
    rows = train_kind(kind, tmp_path / "run", 3, faults=faults, launcher=launcher)
    same(tmp_path / "run", alone(kind))
    resumed = [row["step"] for row in rows if row["event"] == "Resumed"]
    assert resumed == ([] if "feedback" in kind else [10])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), (BUDDY,)])
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_replacements_get_what_was_cut_off(train_kind, alone, tmp_path, kind, more, launcher):
    long = ("steps=120", "checkpoint.every=40", "eval_every=60", "digest_every=20")
    faults = [PlannedFault(1, 4), PlannedFault(0, 70, "reduce")]
    # So that there are still steps to do when another process has come.
    faults += [PlannedFault(2, step, "compute", "slow", sleep_s=0.03) for step in range(6, 118)]
    rows = train_kind(
        kind, tmp_path / "run", 3, *long, *more, "--replace", 2, launcher=launcher, faults=faults
    )
    same(tmp_path / "run", alone(kind, "digits", *long))
    assert any(row["event"] == "Joined" and row["step"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_on_other_ranks(train_kind, lockstep, alone, tmp_path, kind):
    run_dir = tmp_path / "run"
    train_kind(kind, run_dir, 3, "stop_at_step=7")
    more = ("-n", 2, "--launcher", "mpi", "stop_at_step=null")
    ended = lockstep("resume", run_dir, *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, alone(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_cut_off_moves_to_faster_ranks(train_kind, alone, tmp_path, kind):
    slow = [PlannedFault(0, step, "compute", "slow", sleep_s=0.1) for step in range(STEPS)]
    rows = train_kind(kind, tmp_path / "run", 2, "balance_every=4", faults=slow)
    same(tmp_path / "run", alone(kind))
    assert any(row["event"] == "Rebalanced" for row in rows)


@pytest.mark.slow
def test_fewer_bytes_are_sent(train_kind, tmp_path):
    """Of two ranks, whose gradient of 86 KB goes once each way if it is whole."""
    sent = {}
    for kind, most in {"int8": 0.4, "topk": 0.45}.items():
        rows = train_kind(kind, tmp_path / kind, 2, "steps=6", "eval_every=6")
        sent[kind] = sent_bytes(rows)
        assert sent[kind] < most * 86_000
    rows = train_kind("int8", tmp_path / "copied", 2, "steps=6", "eval_every=6", BUDDY)
    # The copies are of three microbatches: each as large as the whole gradient.
    assert sent_bytes(rows) > sent["int8"] + 3 * 86_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_named(here, tmp_path, kind):
    tasks = tmp_path / "explodes.py"
    tasks.write_text(EXPLODES)
    about = (f"compression.name={kind.partition(',')[0]}", *KINDS[kind])
    ended = here("train", f"{tasks}:Explodes", *about, "batch_size=16", "num_microbatches=4")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    said = " ".join((ended.stdout + ended.stderr).split())
    assert "the loss is finite, but not the gradient of second.weight;" in said


EXPLODES = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class Root(torch.autograd.Function):
    """A loss that is finite where its gradient is not: the root of nothing."""

    @staticmethod
    def forward(ctx, weight, bad):
        ctx.bad = bad
        ctx.save_for_backward(weight)
        return weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        made = torch.ones_like(weight)
        if ctx.bad:
            made.view(-1)[-1] = float("nan")
        return made, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(30, 30) for _ in range(3))


class Explodes(ls.Task):
    def build_model(self):
        return Net()

    def dataset(self, split):
        rows = torch.arange(64.0)[:, None]
        return TensorDataset(rows) if split == "train" else None

    def loss(self, model, batch):
        (rows,) = batch
        bad = bool((rows == self.bad_row).any())
        total = sum(p.sum() for p in model.parameters()) + Root.apply(model.second.weight, bad)
        return ls.Loss(total * len(rows), len(rows))

    bad_row = 27
'''


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("mesh.tp=2", "num_shards=2"), "mesh.tp=2, mesh.pp=1: compression.name=int8 is for ranks"),
        (("mesh.pp=2",), "mesh.tp=1, mesh.pp=2: compression.name=int8 is for ranks"),
        (("sharding=gradients",), "sharding=gradients, optimizer.sharded=False: ranks send each"),
        (("sharding=optimizer",), "sharding=optimizer, optimizer.sharded=False: ranks send each"),
        (("optimizer.sharded=true",), "sharding=none, optimizer.sharded=True: ranks send each"),
        (("precision.dtype=fp16",), "precision.dtype=fp16: what compression.name=int8 cuts off"),
        (
            ("num_microbatches=128", "batch_size=128"),
            "num_microbatches=128: compression.name=int8 has integers for the sum of at most 127",
        ),
        (("compression.rank=0",), "compression.rank=0: input should be greater than 0"),
        (
            ("compression.name=lowrank", "compression.rank=300"),
            "compression.rank=300: no parameter is a matrix that two factors",
        ),
        (("compression.name=int4",), "compression.name='int4': input should be 'none', 'int8'"),
        (("compression.ratio=0",), "compression.ratio=0: input should be greater than 0"),
        (("compression.ratio=1.5",), "compression.ratio=1.5: input should be less than or equal"),
    ],
)
def test_what_does_not_go_together_is_refused(here, more, said):
    ended = here("train", *keys("int8"), *more)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_task_with_phases_is_refused(here):
    ended = here("train", f"{TABLES}:InPhases", "steps=2", "compression.name=topk")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "compression.name=topk: InPhases has phases" in " ".join(ended.stderr.split())


def test_a_plan_is_of_whole_gradients(here):
    ended = here("plan", "digits", "compression.name=int8")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "compression.name=int8: a plan is of gradients that" in " ".join(ended.stderr.split())
