"""A rank hangs in a run with real ranks: who hung, after which call, and who waited is said."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.comm.call_records import read_calls
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TASK = f"{Path(__file__).with_name('hanging_tasks.py')}:Hanging"


@pytest.fixture
def train(lockstep, launcher, tmp_path):
    """Runs a training of the task on three ranks."""

    def call(*overrides, **env):
        return lockstep(
            "train", TASK, "-n", 3, "--launcher", launcher, "--run-dir", tmp_path / "run",
            *overrides, timeout=120, **env,
        )  # fmt: skip

    return call


def lost(run_dir):
    """The events of ranks that were lost."""
    return [e for e in read_events(run_dir / "events.jsonl") if e["event"] == "RankLost"]


def number(text):
    """The number of the call in `after call 1,234 (all_gather)`."""
    return int(text.partition("call ")[2].partition(" ")[0].replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_hang_is_told_by_rank_call_and_those_who_waited(train, lockstep, tmp_path):
    done = train()
    assert done.returncode == 0, done.stderr
    (event,) = lost(tmp_path / "run")
    assert event["rank"] == 1
    assert event["reached"].startswith(f"in step {event['step'] + 1}, after call ")
    assert event["waiting"].startswith("ranks 0 and 2 waited for it in call ")
    assert number(event["waiting"]) == number(event["reached"]) + 1

    first, *causes = map(json.loads, lockstep("diagnose", "run", "--json").stdout.splitlines())
    hang = next(cause for cause in (first, *causes) if cause["name"] == "hang")
    begin = f"rank 1 (slot 1) hung {event['reached']}, at hanging_tasks.py:"
    assert hang["sentence"].startswith(begin)
    assert hang["sentence"].endswith(f" in loss; {event['waiting']}")

    logs = [read_calls(tmp_path / f"run/flight/0001/slot_{slot}.calls") for slot in range(3)]
    assert [log.rank for log in logs] == [0, 1, 2]
    assert logs[1].stuck is None
    assert {(log.stuck.kind, log.stuck.number) for log in logs if log.rank != 1} == {
        ("all_gather", number(event["waiting"]))
    }

    said = lockstep("diagnose", "run", "--flight", "dumps").stdout
    assert "torch.distributed.flight_recorder.fr_trace dumps" in said
    argv = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "dumps"]
    judged = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    told = judged.stdout + judged.stderr
    missing = f"Not all ranks joining collective, sequence number: {number(event['waiting'])}"
    assert missing in told
    assert "missing ranks: {1}" in told

    removed = lockstep("runs", "remove", "run", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_stopped_rank_in_a_group_of_which_others_wait(train, tmp_path):
    fault = PlannedFault(2, 10, "reduce", "stop")
    done = train(CALLS_OF_LOSS="-1000000", **to_env([fault]))
    assert done.returncode == 0, done.stderr
    (event,) = lost(tmp_path / "run")
    assert event["reached"].startswith("in step 11, after call ")
    # Its watchdog wakes it for its stack: within that moment it may have sent to one of them.
    assert re.match(r"ranks? 0.* waited for it in call \d+ \(all_gather\)", event["waiting"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_killed_rank_leaves_the_calls_of_the_others_and_a_run_without_losses_nothing(
    train, lockstep, tmp_path
):
    fault = PlannedFault(1, 5, "reduce", "kill")
    done = train("steps=8", CALLS_OF_LOSS="-1000000", **to_env([fault]))
    assert done.returncode == 0, done.stderr
    (event,) = lost(tmp_path / "run")
    assert (event["reached"], event["waiting"]) == ("", "")
    names = sorted(path.name for path in (tmp_path / "run/flight/0001").iterdir())
    assert names == ["slot_0.calls", "slot_2.calls"]
    assert "of rank 1 nothing is known" in lockstep("diagnose", "run", "--flight", "dumps").stdout

    (tmp_path / "run").rename(tmp_path / "lossy")
    done = train("steps=8", CALLS_OF_LOSS="-1000000")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run/flight").exists()
    refused = lockstep("diagnose", "run", "--flight", "more")
    assert refused.returncode == 2
    assert "holds no calls" in refused.stderr
