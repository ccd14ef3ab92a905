"""State of microbatches goes with them: the bits of one process, through losses and resumes."""

from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import same as equal

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

TASKS = Path(__file__).with_name("carry_tasks.py")
TASK = f"{TASKS}:Read"
STEPS = 24
CONFIG = (
    f"steps={STEPS}", "lr=0.01", "eval_every=8", "eval_batch_size=20", "log_every=1",
    "checkpoint.every=5", "digest_every=4", "num_shards=2",
)  # fmt: skip


def same(run_dir, reference):
    equal(run_dir, reference)
    steps = [r["step"] for r in read_events(run_dir / "events.jsonl") if r["event"] == "StepDone"]
    assert steps[-1] == STEPS


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys"),
    [
        ("mpi", 3, ()),
        pytest.param("local", 2, ("sharding=parameters",), marks=pytest.mark.slow),
        pytest.param("torchrun", 4, (), marks=pytest.mark.slow),
        pytest.param("local", 7, (), marks=pytest.mark.slow),  # two of them are spares
        pytest.param("mpi", 4, ("mesh.tp=2",), marks=pytest.mark.slow),
        pytest.param("local", 3, ("optimizer.sharded=true",), marks=pytest.mark.slow),
        pytest.param("local", 3, ("sharding=gradients",), marks=pytest.mark.slow),
    ],
)
def test_any_ranks_give_the_bits_of_one_process(
    train_on, reference, tmp_path, launcher, num_ranks, keys
):
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    if keys == ("sharding=parameters",):
        assert ended.returncode == 2  # of a pipeline only
        return
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.parametrize("launcher", ["local", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "faults",
    [
        [(1, 2, "copy"), (0, 9, "copied")],
        *(
            pytest.param(faults, marks=pytest.mark.slow)
            for faults in (
                [(0, 0, "copy")],
                [(2, 1, "copied"), (1, 12, "reduce")],
                [(0, 7, "optimizer"), (2, 14, "committed")],
                [(1, 5, "checkpoint"), (0, 5, "checkpoint")],
                [(2, 8, "evaluate"), (0, 20, "forward")],
                [(1, 11, "copied", "miss"), (2, 15, "copy", "miss")],
                [(1, 3, "forward", "raise"), (1, 11, "backward", "raise")],
            )
        ),
    ],
)
def test_no_carry_is_lost_with_a_rank(train_on, reference, tmp_path, launcher, faults):
    planned = [PlannedFault(*fault) for fault in faults]
    ended = train_on(tmp_path / "run", 3, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    recovered = [row for row in rows if row["event"] in ("RankLost", "Recovered")]
    assert len({row["step"] for row in rows if row["event"] == "StepDone"}) == STEPS
    assert not any(row["event"] == "Resumed" for row in rows)
    assert recovered or "raise" in str(faults)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize("keys", [(), ("optimizer.sharded=true",)])
def test_without_copies_survivors_go_back_to_the_checkpoint(
    train_on, reference, tmp_path, launcher, keys
):
    run_dir = tmp_path / "run"
    ended = train_on(
        run_dir, 3, "carry.buddy=false", *keys, launcher=launcher,
        faults=[PlannedFault(1, 13, "reduce"), PlannedFault(0, 22, "committed")],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)
    rows = read_events(run_dir / "events.jsonl")
    first, second = [row["step"] for row in rows if row["event"] == "Resumed"]
    assert first == 10
    assert second in (15, 16, 20)  # the last may have been on its way when its writer was killed
    assert sum("are done again, from the checkpoint of step" in str(r) for r in rows) == 2
    assert len({r["pid"] for r in rows if r["event"] == "Joined"}) == 3  # nobody was started again
    lines = (run_dir / "metrics.csv").read_text().splitlines()[1:]
    steps = [int(line.partition(",")[0]) for line in lines if ",train," in line]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "goes_back"),
    [
        ([(1, 6, "reduced"), (2, 13, "reduce")], False),
        ([(0, 13, "reduce"), (1, 13, "reduce")], True),
    ],
)
def test_ranks_that_share_layers_all_have_their_carries(
    train_on, reference, tmp_path, faults, goes_back
):
    """The second of two losses takes a whole replica along, and with it what it carried."""
    planned = [PlannedFault(*fault) for fault in faults]
    ended = train_on(tmp_path / "run", 4, "mesh.tp=2", faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert any(row["event"] == "Resumed" for row in rows) == goes_back


@pytest.mark.slow
def test_going_back_survives_a_further_loss(train_on, reference, tmp_path):
    faults = [
        PlannedFault(1, 8, "reduce"), PlannedFault(0, 8, "catch_up"), PlannedFault(3, 5, "regroup"),
    ]  # fmt: skip
    ended = train_on(tmp_path / "run", 4, "carry.buddy=false", faults=faults, launcher="mpi")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
def test_a_loss_before_the_first_checkpoint_ends_the_session(train_on, tmp_path):
    keys = ("carry.buddy=false", "checkpoint.every=100", "steps=4", "eval_every=0")
    ended = train_on(tmp_path / "run", 2, *keys, faults=[PlannedFault(1, 2, "reduce")])
    # All ranks are started again, from the beginning.
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "before there was a checkpoint" in (ended.stdout + ended.stderr).replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("mesh.tp=2",), ("optimizer.sharded=true",)])
def test_a_run_is_resumed_on_other_ranks(train_on, lockstep, reference, tmp_path, keys):
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, 4, "stop_at_step=7", *keys)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    plain = ("mesh.tp=1", "optimizer.sharded=false")
    assert lockstep("resume", run_dir, *plain, "stop_at_step=12").returncode == 0
    more = ("-n", 3, "--launcher", "mpi", *plain, "stop_at_step=null")
    ended = lockstep("resume", run_dir, *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("carry.buddy=false",)])
def test_joiners_get_the_carries_of_their_microbatches(train_on, lockstep, tmp_path, keys):
    long = ("steps=150", "checkpoint.every=40", "eval_every=50")
    assert lockstep("train", TASK, *CONFIG, *long, "--run-dir", tmp_path / "one").returncode == 0
    faults = [PlannedFault(1, 4), PlannedFault(0, 60, "copy")]
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, 3, *long, *keys, "--replace", 2, launcher="mpi", faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for key in ("params_sha256", "carry_sha256"):
        assert result(run_dir)[key] == result(tmp_path / "one")[key]


def test_a_checkpoint_holds_what_each_microbatch_carries(here, tmp_path):
    keys = ("steps=7", "checkpoint.every=7", "eval_every=100")  # step 8 has the short batch
    assert here("train", TASK, "--run-dir", "run", *CONFIG, *keys).returncode == 0
    snapshot, _, _ = checkpoint.newest_valid(tmp_path / "run" / "checkpoints")
    assert list(snapshot.meta["carry"]) == ["0", "1", "2", "3", "4"]
    assert snapshot.carry["0/memory"].shape == (1, 3, 12)
    assert snapshot.meta["carry"]["4"]["dict"]["steps"] == 7


@pytest.mark.parametrize(
    ("task", "keys", "said"),
    [
        ("Read", ("evil=object",), "Task.loss: the carry: steps: a object cannot be kept"),
        ("Forgets", (), "Task.loss: must return (lockstep.Loss, carry)"),
        ("TakesNone", (), "TakesNone.loss: must take (model, batch, carry)"),
        ("Short", (), "Short.carry: must be a method that takes (model, batch)"),
        ("Evaluates", (), "Evaluates.evaluate: must be a method that takes (model, batch)"),
        ("HasNone", (), "HasNone.loss: takes (model, batch, carry), but HasNone.carry is missing"),
    ],
)
def test_a_carry_that_cannot_be_is_one_message(here, task, keys, said):
    config = CONFIG if task in ("Read", "Forgets") else ("steps=2",)
    refused(here("train", f"{TASKS}:{task}", *config, *keys), said)


def refused(ended, said):
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_carry_that_is_another_one_each_time_is_refused(here):
    said = "gave another carry when the same batch was computed again"
    refused(here("train", f"{TASKS}:Random", *CONFIG), said)


def test_a_pipeline_in_stages_has_no_carry(train_on, tmp_path):
    refused(train_on(tmp_path / "run", 2, "mesh.pp=2"), "mesh.pp=2: the first stage of a pipeline")


def test_evaluations_begin_with_a_carry_of_their_own(reference):
    assert reference["metrics"]["val/steps"] == 0.0
    assert reference["metrics"]["train/steps"] > 10
