"""Ranks die, hang and fail at every moment of a step; the survivors go on, to the same bits."""

import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import environment, result, slow, target

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events
from lockstep.observe.storing.jsonl import follow_events

STEPS = 24
CONFIG = (
    f"steps={STEPS}", "batch_size=64", "eval_every=6", "checkpoint.every=5", "checkpoint.keep=9",
    "log_every=1", "model=cnn", "hang_timeout_s=1.5", "digest_every=7",
)  # fmt: skip


ALWAYS = pytest.mark.parametrize("launcher", ["mpi", "local"])
SLOW_ON_MPI = pytest.mark.parametrize("launcher", [slow("mpi"), "local"])
SLOW_ON_LOCAL = pytest.mark.parametrize("launcher", ["mpi", slow("local")])


@pytest.fixture
def launcher():
    """What starts the ranks; tests of survivors are run under each that lets them survive."""
    return "mpi"


@pytest.fixture
def train(lockstep, launcher):
    """Runs a training with faults, each of which strikes once."""

    def call(run_dir, num_ranks, *overrides, faults=(), **options):
        return lockstep(
            "train", "digits", "-n", num_ranks, "--launcher", launcher, "--run-dir", run_dir,
            *CONFIG, *overrides, timeout=120,
            **to_env(faults, run_dir.with_suffix(".faults")), **options,
        )  # fmt: skip

    return call


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The SHA-256 of a run of one process, and the rows of its metrics."""
    folder = tmp_path_factory.mktemp("reference")
    argv = [sys.executable, "-m", "lockstep", "train", "digits", "--run-dir", "run", *CONFIG]
    subprocess.run(argv, cwd=folder, env=environment(), check=True, capture_output=True)
    return result(folder / "run")["params_sha256"], curves(folder / "run")


def curves(run_dir):
    """Every row of metrics.csv, without times."""
    with (Path(run_dir) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [[row[k] for k in ("step", "epoch", "split", "loss", "lr", "grad_norm")] for row in rows]


def check(run_dir, reference, num_left, num_lost):
    """The run ended with the reference's bits; no row is missing, doubled or different."""
    rows = read_events(run_dir / "events.jsonl")
    found = result(run_dir)
    assert found["status"] == "completed"
    assert found["params_sha256"] == reference[0]
    assert found["world_size"] == num_left
    assert curves(run_dir) == reference[1]
    steps = [r["step"] for r in rows if r["event"] == "StepDone"]
    assert steps == list(range(1, STEPS + 1))
    evaluated = [(r["step"], r["split"]) for r in rows if r["event"] == "Evaluated"]
    assert evaluated == [(s, "val") for s in range(6, STEPS + 1, 6)] + [(STEPS, "test")]
    lost = [r["slot"] for r in rows if r["event"] == "RankLost"]
    assert len(lost) == len(set(lost)) == num_lost
    assert len([r for r in rows if r["event"] == "Finished"]) == 1
    saved = {folder.name for folder in listing.folders(run_dir / "checkpoints")}
    assert listing.folder_name(STEPS) in saved
    snapshot, _, skipped = checkpoint.newest_valid(run_dir / "checkpoints")
    assert snapshot.step == STEPS
    assert skipped == []
    return rows


MOMENTS = ["compute", "reduce", "reduced", "optimizer", "committed", "evaluate"]


@SLOW_ON_LOCAL
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow
def test_a_killed_rank(train, tmp_path, reference, slot, moment):
    done = train(tmp_path / "run", 3, faults=[PlannedFault(slot, 10, moment)])
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", reference, num_left=2, num_lost=1)


@SLOW_ON_LOCAL
def test_loader_workers_and_their_rank_are_killed(train, tmp_path, reference):
    """A killed worker is an exception of the task, wherever its rank is; one that is left behind
    holds nothing back."""
    faults = [
        PlannedFault(1, 6, "reduce", "worker"),
        PlannedFault(0, 8, "optimizer", "worker"),
        PlannedFault(0, 13),
    ]
    done = train(tmp_path / "run", 2, "data.num_workers=1", faults=faults)
    assert done.returncode == 0, done.stderr
    rows = check(tmp_path / "run", reference, num_left=1, num_lost=1)
    messages = [r["message"] for r in rows if r["event"] == "Warned"]
    again = [m.partition(":")[0] for m in messages if "is done again" in m]
    assert again == ["step 7 is done again", "step 9 is done again"]
    [recovered] = [r for r in rows if r["event"] == "Recovered"]
    assert recovered["seconds"] < 2
    assert recovered["microbatches"] == [8]


@ALWAYS
@pytest.mark.slow
def test_rank_0_is_killed_while_it_writes_a_checkpoint(train, tmp_path, reference):
    done = train(tmp_path / "run", 3, faults=[PlannedFault(0, 10, "checkpoint")])
    assert done.returncode == 0, done.stderr
    rows = check(tmp_path / "run", reference, num_left=2, num_lost=1)
    assert [r["microbatches"] for r in rows if r["event"] == "Recovered"] == [[4, 4]]


@pytest.mark.slow
@SLOW_ON_LOCAL
def test_the_best_checkpoint_on_a_slow_disk_outlives_its_writer(train, tmp_path, reference):
    """The disk takes four hang timeouts; then rank 0 dies before the best is there."""
    slow_disk = PlannedFault(0, 5, "checkpoint", "slow", sleep_s=6.0)
    faults = [slow_disk, PlannedFault(0, 6, "checkpoint", "kill")]
    # The reference has another best step, but the same last one.
    keys = ("watch=loss", "watch_mode=max", "test_on=last")
    done = train(tmp_path / "run", 2, *keys, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", reference, num_left=1, num_lost=1)
    root = tmp_path / "run" / "checkpoints"
    assert checkpoint.read(listing.read_hint(root, "best")).meta["progress"]["best_step"] == 6


@ALWAYS
@pytest.mark.slow
def test_two_ranks_at_once(train, tmp_path, reference):
    faults = [PlannedFault(0, 9, "reduce"), PlannedFault(2, 9, "reduce")]
    done = train(tmp_path / "run", 4, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", reference, num_left=2, num_lost=2)


@ALWAYS
@pytest.mark.slow
def test_ranks_die_in_the_midst_of_large_transfers(lockstep, tmp_path, launcher):
    """Connections close when parts of messages have come and others wait for room in a socket."""
    tasks = Path(__file__).parent / "tasks.py"
    command = ["train", f"{tasks}:Everything", "wide=60000", "steps=8", "checkpoint.every=100"]
    faults = [PlannedFault(slot, 2 * slot, "reduce", delay_s=0.01 * slot) for slot in (1, 2, 3)]
    for folder, ranks in ("one", ()), ("four", ("-n", "4", "--launcher", launcher)):
        planned = to_env(faults) if ranks else {}
        done = lockstep(*command, *ranks, "--run-dir", tmp_path / folder, timeout=120, **planned)
        assert done.returncode == 0, done.stderr
    assert result(tmp_path / "four")["world_size"] == 1
    digests = [result(tmp_path / folder)["params_sha256"] for folder in ("one", "four")]
    assert digests[0] == digests[1]


@ALWAYS
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["regroup", "catch_up"])
@pytest.mark.parametrize("slot", [0, 3])
def test_a_rank_dies_while_the_others_recover(train, tmp_path, reference, moment, slot):
    faults = [PlannedFault(1, 8, "optimizer"), PlannedFault(slot, 8, moment)]
    done = train(tmp_path / "run", 4, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", reference, num_left=2, num_lost=2)


@ALWAYS
@pytest.mark.slow
def test_a_spare_steps_in(train, tmp_path):
    """Of three ranks with two microbatches, one has nothing to do until another dies."""
    overrides = ("num_microbatches=2",)
    alone = train(tmp_path / "alone", 1, *overrides)
    done = train(tmp_path / "run", 3, *overrides, faults=[PlannedFault(0, 10, "reduced")])
    assert (alone.returncode, done.returncode) == (0, 0), done.stderr
    assert result(tmp_path / "run")["params_sha256"] == result(tmp_path / "alone")["params_sha256"]
    rows = read_events(tmp_path / "run" / "events.jsonl")
    spent = {
        (len(row["ranks"]), times["rank"]): times["compute_s"]
        for row in rows
        if row["event"] == "StepDone" and row["step"] in (5, 20)
        for times in row["ranks"]
    }
    assert spent[3, 2] < spent[3, 1] / 4
    assert spent[2, 1] > spent[3, 2] * 4


@pytest.mark.slow
@SLOW_ON_MPI
def test_down_to_one_rank(train, tmp_path, reference):
    faults = [
        PlannedFault(0, 5, "reduced"),
        PlannedFault(1, 9, "compute"),
        PlannedFault(3, 15, "committed"),
    ]
    done = train(tmp_path / "run", 4, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", reference, num_left=1, num_lost=3)


@SLOW_ON_LOCAL
def test_a_stopped_rank_is_ended_by_its_watchdog(train, tmp_path, reference):
    done = train(tmp_path / "run", 3, faults=[PlannedFault(1, 10, "compute", "stop")])
    assert done.returncode == 0, done.stderr
    rows = check(tmp_path / "run", reference, num_left=2, num_lost=1)
    lost = next(r for r in rows if r["event"] == "RankLost")
    reason = lost["reason"]
    assert "was stopped by a signal for 1.5 s" in reason
    # It is not continued for its stack: it would train then, and be killed in a later step.
    assert (lost["step"], "stack" in reason) == (10, False)
    assert lost["reached"].startswith("in step 11, after call ")
    assert " waited for it in call " in lost["waiting"]


@ALWAYS
@pytest.mark.slow
def test_an_exception_is_met_by_doing_the_step_again(train, tmp_path, reference):
    done = train(tmp_path / "run", 2, faults=[PlannedFault(1, 10, "compute", "raise")])
    assert done.returncode == 0, done.stderr
    rows = check(tmp_path / "run", reference, num_left=2, num_lost=0)
    messages = [r["message"] for r in rows if r["event"] == "Warned"]
    assert any("step 10 is done again: rank 1 raised an exception" in m for m in messages)


@SLOW_ON_LOCAL
@pytest.mark.parametrize("moment", ["reduced", slow("reduce"), slow("committed")])
def test_a_rank_that_is_behind_catches_up(train, tmp_path, reference, moment):
    faults = [PlannedFault(1, 10, moment, "miss"), PlannedFault(0, 14, moment, "miss")]
    done = train(tmp_path / "run", 3, faults=faults)
    assert done.returncode == 0, done.stderr
    rows = check(tmp_path / "run", reference, num_left=3, num_lost=0)
    copied = [r["copied"] for r in rows if r["event"] == "Recovered"]
    assert len(copied) == 2
    assert any(copied) == (moment == "reduced")


SHARDED = ("optimizer.sharded=true", "clip_norm=1.5")


@pytest.fixture(scope="module")
def sharded_reference(tmp_path_factory):
    """As `reference`, with a norm that clips."""
    folder = tmp_path_factory.mktemp("sharded")
    argv = [sys.executable, "-m", "lockstep", "train", "digits", "--run-dir", "run"]
    argv += [*CONFIG, *SHARDED]
    subprocess.run(argv, cwd=folder, env=environment(), check=True, capture_output=True)
    return result(folder / "run")["params_sha256"], curves(folder / "run")


SHARDED_MOMENTS = ["gather", *map(slow, ("compute", "reduced", "optimizer", "committed"))]


@SLOW_ON_LOCAL
@pytest.mark.parametrize("moment", SHARDED_MOMENTS)
@pytest.mark.parametrize("slot", [slow(0), 1])
def test_sharded_state_survives_the_loss_of_ranks(train, tmp_path, sharded_reference, slot, moment):
    """One rank dies, one that is no neighbour in the recovery from that, and a third one later."""
    faults = [
        PlannedFault(slot, 10, moment),
        PlannedFault(slot + 2, 10, "catch_up"),
        PlannedFault(3 - slot, 16, moment),
    ]
    done = train(tmp_path / "run", 4, *SHARDED, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", sharded_reference, num_left=1, num_lost=3)


@ALWAYS
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["reduced", "optimizer", "gather"])
def test_sharded_ranks_that_are_behind_catch_up(train, tmp_path, sharded_reference, moment):
    faults = [PlannedFault(1, 10, moment, "miss"), PlannedFault(0, 14, moment, "miss")]
    done = train(tmp_path / "run", 3, *SHARDED, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", sharded_reference, num_left=3, num_lost=0)


@SLOW_ON_MPI
def test_what_a_task_does_after_a_step_is_done_once(lockstep, tmp_path, launcher):
    """Ranks that have done it meet others that have not, with slices of what it changes."""
    config = ("teacher=true", "optimizer.sharded=true", "log_every=1", "hang_timeout_s=5")
    whole = lockstep("train", target(), "--run-dir", "whole", *config)
    assert whole.returncode == 0, whole.stderr
    faults = [PlannedFault(1, 4, "gathered", "miss"), PlannedFault(0, 7, "gathered", "miss")]
    faults += [PlannedFault(2, 9, "gather", "miss"), PlannedFault(0, 11, "gathered")]
    done = lockstep(
        "train", target(), "-n", 3, "--launcher", launcher, "--run-dir", "parts", *config,
        **to_env(faults, tmp_path / "faults"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "parts")["world_size"] == 2
    ended, expected = result(tmp_path / "parts"), result(tmp_path / "whole")
    assert ended["params_sha256"] == expected["params_sha256"]


@ALWAYS
@pytest.mark.slow
def test_a_slice_that_is_lost_comes_from_the_checkpoint(train, tmp_path, sharded_reference):
    faults = [PlannedFault(0, 13, "compute"), PlannedFault(1, 13, "compute")]
    done = train(tmp_path / "run", 3, *SHARDED, faults=faults)
    assert done.returncode == 0, done.stderr
    assert "the last copy of its part of the optimizer's state" in done.stderr
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert [r["step"] for r in rows if r["event"] == "Resumed"] == [12]
    assert result(tmp_path / "run")["params_sha256"] == sharded_reference[0]


@ALWAYS
@pytest.mark.slow
def test_a_slow_rank_is_left_alone(train, tmp_path, reference):
    faults = [PlannedFault(1, step, "compute", "slow") for step in (5, 10, 15)]
    done = train(tmp_path / "run", 2, faults=faults)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", reference, num_left=2, num_lost=0)


@ALWAYS
@pytest.mark.slow
def test_too_few_ranks_stop_with_a_checkpoint_and_are_started_again(train, tmp_path, reference):
    faults = [PlannedFault(1, 9, "compute")]
    done = train(tmp_path / "run", 2, "min_ranks=2", faults=faults)
    assert done.returncode == 0, done.stderr
    assert "too few ranks left; starting again from the newest checkpoint in 1 s" in done.stderr
    rows = read_events(tmp_path / "run" / "events.jsonl")
    ends = [(r["step"], r["reason"]) for r in rows if r["event"] == "Finished"]
    assert ends == [(9, "too few ranks left"), (STEPS, "all steps done")]
    assert result(tmp_path / "run")["params_sha256"] == reference[0]
    assert curves(tmp_path / "run") == reference[1]


@ALWAYS
@pytest.mark.slow
def test_all_ranks_die_and_are_started_again(train, tmp_path, reference):
    faults = [PlannedFault(slot, 12, "committed") for slot in range(2)]
    done = train(tmp_path / "run", 2, faults=faults)
    assert done.returncode == 0, done.stderr
    assert "all ranks have died; starting again from the newest checkpoint" in done.stderr
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert [r["step"] for r in rows if r["event"] == "Resumed"] == [10]
    assert result(tmp_path / "run")["params_sha256"] == reference[0]
    assert curves(tmp_path / "run") == reference[1]


@SLOW_ON_MPI
def test_ranks_that_find_nobody_they_could_replace_leave_checkpoints_alone(
    train, tmp_path, reference
):
    faults = [PlannedFault(slot, 12, "committed") for slot in range(2)]
    done = train(tmp_path / "run", 2, "--replace", 1, faults=faults)
    assert done.returncode == 0, done.stderr
    rows = read_events(tmp_path / "run" / "events.jsonl")
    (again,) = [i for i, r in enumerate(rows) if r["event"] == "Resumed"]
    written = {r["step"] for r in rows[:again] if r["event"] == "Checkpointed"}
    assert rows[again]["step"] in {5, 6, 10}
    assert rows[again]["step"] >= max(written)  # that of step 10 may be, when both die
    assert not [*(tmp_path / "run" / "checkpoints").glob("damaged_*")]
    assert result(tmp_path / "run")["params_sha256"] == reference[0]
    assert curves(tmp_path / "run") == reference[1]


@pytest.mark.slow
def test_the_launcher_gives_up_when_there_is_no_progress(lockstep, tmp_path):
    """Ranks that die at the same step in every life."""
    faults = [PlannedFault(slot, 12, "committed") for slot in range(2)]
    done = lockstep(
        "train", "digits", "-n", 2, "--run-dir", tmp_path / "run", *CONFIG, **to_env(faults)
    )
    assert done.returncode not in (0, 2)
    assert "(3 of 3 without progress)" in done.stderr
    assert "error: all ranks have died" in done.stderr


@pytest.fixture(scope="module")
def long_references(tmp_path_factory):
    """The SHA-256 of a run that is long enough for a process to start meanwhile, by overrides."""

    @functools.cache
    def get(overrides):
        folder = tmp_path_factory.mktemp("long")
        argv = [sys.executable, "-m", "lockstep", "train", "digits", "--run-dir", "run"]
        argv += [*CONFIG, *LONG, *overrides]
        subprocess.run(argv, cwd=folder, env=environment(), check=True, capture_output=True)
        return result(folder / "run")["params_sha256"]

    return get


LONG = ("steps=5000", "stop_at_step=400", "eval_every=100", "checkpoint.every=150", "log_every=7")


@pytest.mark.parametrize("overrides", [("model=mlp",), ("model=mlp", *SHARDED)])
@ALWAYS
@pytest.mark.slow
def test_a_killed_rank_is_replaced(train, tmp_path, long_references, overrides):
    """A rank is killed, then rank 0 when the new process takes part: its state is whole.

    The process that replaces rank 0 takes longer to start than the others take to the end.
    """
    run_dir = tmp_path / "run"
    options = ("--replace", 2)
    faults = [PlannedFault(1, 10, "compute"), PlannedFault(0, 396, "reduced")]
    faults += [PlannedFault(4, 0, "join", "slow", sleep_s=3)]
    slower = [PlannedFault(2, step, "compute", "slow") for step in range(20, 27)]
    done = train(run_dir, 3, *LONG, *overrides, *options, faults=[*faults, *slower])
    assert done.returncode == 0, done.stderr
    assert result(run_dir)["params_sha256"] == long_references(overrides)
    rows = read_events(run_dir / "events.jsonl")
    assert [r["slot"] for r in rows if r["event"] == "Joined"] == [0, 1, 2, 3]
    sizes = [r["world_size"] for r in rows if r["event"] == "Recovered"]
    assert sizes == [2, 3, 2]
    steps = [r["step"] for r in rows if r["event"] == "StepDone"]
    assert len(steps) == len(set(steps))
    assert sum(r["num_steps"] for r in rows if r["event"] == "StepDone") == 400


SCRIPT = """
from dataclasses import replace
import lockstep
from lockstep.systems.digits.task import Digits

class Mine(Digits):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return replace(loss, sum=loss.sum * 1.0)

lockstep.main(Mine())
"""


@SLOW_ON_MPI
def test_a_new_process_with_an_edited_script_is_refused(lockstep, tmp_path, launcher):
    run_dir, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = ["train", str(script), *CONFIG, "model=mlp", "steps=50000", "--run-dir"]
    ranks = ["-n", "2", "--replace", "3", "--launcher", launcher]
    child = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *argv, str(run_dir), *ranks],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(run_dir, lambda row: row["event"] == "StepDone")
        script.write_text(SCRIPT.replace("* 1.0", "* 1.1"))
        kill(run_dir, slot=1)
        refused = wait_for(run_dir, lambda row: "is refused" in row.get("message", ""))
        wait_for(run_dir, lambda row: row["event"] == "StepDone" and row["step"] > refused["step"])
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    finally:
        child.kill()
    assert refused["message"].startswith("the new process of slot 2 on ")
    assert "differs in loss and gradient of the first microbatch; the script" in refused["message"]
    rows = read_events(run_dir / "events.jsonl")
    assert [r["slot"] for r in rows if r["event"] == "Joined"] == [0, 1]
    assert [r["slot"] for r in rows if r["event"] == "RankLost"] == [1]
    assert len([r for r in rows if "is refused" in r.get("message", "")]) == 1
    script.write_text(SCRIPT)
    done = lockstep(*argv, tmp_path / "alone", f"stop_at_step={result(run_dir)['step']}")
    assert done.returncode == 0, done.stderr
    assert result(run_dir)["params_sha256"] == result(tmp_path / "alone")["params_sha256"]


def wait_for(run_dir, is_it, timeout_s=120):
    """The first row of events.jsonl, as it is written, for which `is_it` is true."""
    deadline = time.monotonic() + timeout_s
    rows = follow_events(run_dir / "events.jsonl", lambda: time.monotonic() > deadline)
    return next(row for row in rows if is_it(row))


def kill(run_dir, slot, name="KILL"):
    """Signal the process of a slot, from outside."""
    rows = read_events(run_dir / "events.jsonl")
    pid = next(row["pid"] for row in rows if row.get("slot") == slot)
    os.kill(pid, signal.Signals[f"SIG{name}"])


@ALWAYS
@pytest.mark.slow
@pytest.mark.parametrize("step", [11, 13, 16])
def test_rank_0_is_killed_while_a_new_process_starts(train, tmp_path, long_references, step):
    run_dir = tmp_path / "run"
    faults = [PlannedFault(1, 10, "compute"), PlannedFault(0, step, "reduce")]
    slower = [PlannedFault(2, number, "compute", "slow") for number in range(10, 34)]
    overrides = ("model=mlp",)
    done = train(run_dir, 3, *LONG, *overrides, "--replace", 3, faults=[*faults, *slower])
    assert done.returncode == 0, done.stderr
    assert result(run_dir)["params_sha256"] == long_references(overrides)
    rows = read_events(run_dir / "events.jsonl")
    assert max(r["slot"] for r in rows if r["event"] == "Joined") > 2
    assert sum(r["num_steps"] for r in rows if r["event"] == "StepDone") == 400


@pytest.mark.parametrize("launcher", ["torchrun"])
def test_ranks_that_cannot_be_replaced(here, tmp_path, launcher):
    options = ("--launcher", launcher, "--replace", "1", "--run-dir", "run")
    done = here("train", "digits", "-n", "2", *options)
    assert done.returncode == 2
    assert f"--replace 1: the launcher {launcher} cannot replace ranks" in done.stderr
    assert not (tmp_path / "run").exists()


def test_more_ranks_are_wanted_than_there_are(train, tmp_path):
    done = train(tmp_path / "run", 2, "min_ranks=3")
    assert done.returncode == 2
    assert "min_ranks=3: is more than the 2 ranks there are" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("key", ["hang_timeout_s=-1", "min_ranks=0"])
def test_impossible_limits(here, key):
    done = here("train", "digits", "-n", "2", key)
    assert done.returncode == 2
    assert key.partition("=")[0] in done.stderr


OUTSIDE = [
    ("KILL", 0, 0.0), slow("KILL", 2, 0.1), slow("STOP", 0, 0.2), slow("STOP", 1, 0.05),
]  # fmt: skip


@SLOW_ON_LOCAL
@pytest.mark.parametrize(("name", "slot", "delay_s"), OUTSIDE)
def test_a_signal_from_outside(lockstep, tmp_path, reference, launcher, name, slot, delay_s):
    """kill -9 and kill -STOP of a rank whose pid is in events.jsonl, at moments nobody chose."""
    run_dir = tmp_path / "run"
    argv = [sys.executable, "-m", "lockstep", "train", "digits", "-n", "3", "--run-dir", run_dir]
    argv += ["--launcher", launcher]
    slower = to_env([PlannedFault(2, step, "compute", "slow") for step in range(6, 13)])
    child = subprocess.Popen(
        [*map(str, argv), *CONFIG], cwd=tmp_path, env=environment(**slower),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(run_dir, lambda row: row["event"] == "StepDone")
        time.sleep(delay_s)
        kill(run_dir, slot, name)
        assert child.wait(60) == 0
    finally:
        child.kill()
    check(run_dir, reference, num_left=2, num_lost=1)
    assert json.loads((run_dir / "result.json").read_text())["exit_code"] == 0


@pytest.mark.slow
def test_a_slow_rank_gets_fewer_microbatches(train, tmp_path, reference):
    faults = [PlannedFault(1, step, "compute", "slow") for step in range(2, 8)]
    done = train(tmp_path / "run", 2, "balance_every=4", faults=faults)
    assert done.returncode == 0, done.stderr
    rows = check(tmp_path / "run", reference, num_left=2, num_lost=0)
    first = next(r for r in rows if r["event"] == "Rebalanced")
    assert first["slowest"] == 1
    assert first["slowdown"] > 2
    assert first["microbatches"][0] > first["microbatches"][1]
    assert sum(first["microbatches"]) == 8
