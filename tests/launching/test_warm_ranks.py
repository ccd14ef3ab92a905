"""Ranks that are forked from a server: the same bits, and no state of anybody's but their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import environment, result

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TASK = """
import json, os, random
import torch
from lockstep.systems.digits.task import Digits

torch.manual_seed(5)
COUNT = globals().get("COUNT", 0) + 1
with open(os.environ["SEEN"], "a") as file:
    warm = "LOCKSTEP_WARM_SERVER" in os.environ
    print(json.dumps([os.getpid(), warm, COUNT, random.random()]), file=file)


class Mine(Digits):
    pass
"""
STEPS = ("steps=12", "log_every=1", "eval_every=100", "hidden=32")


def command(folder: Path, *options: str, run: str = "run", **env: str) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(TASK)
    argv = [sys.executable, "-m", "lockstep", "train", "mine.py:Mine", *STEPS, "--run-dir", run]
    return subprocess.Popen(
        [*argv, "-n", "2", *options], cwd=folder, text=True,
        env=environment(cold=True, SEEN=str(folder / f"{run}.seen"), **env),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def trained(folder: Path, *options: str, run: str = "run", **env: str) -> dict[str, Any]:
    process = command(folder, *options, run=run, **env)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    return result(folder / run)


def seen(folder: Path, run: str = "run") -> list[list[Any]]:
    """What the file of the task has noted at each of its imports: first the command's."""
    return [json.loads(line) for line in (folder / f"{run}.seen").read_text().splitlines()]


def test_no_state_is_anybody_else_s(tmp_path: Path) -> None:
    trained(tmp_path)
    first, *ranks = seen(tmp_path)
    assert not first[1]
    assert [rank[1] for rank in ranks] == [True, True]
    assert {line[2] for line in seen(tmp_path)} == {1}
    assert len({line[3] for line in seen(tmp_path)}) == 3
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert {row["pid"] for row in rows if row["event"] == "Joined"} == {rank[0] for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_bits_are_those_of_plain_ranks(tmp_path: Path, launcher: str) -> None:
    warm = trained(tmp_path, "--launcher", launcher)
    assert all(line[1] for line in seen(tmp_path)[1:])
    plain = trained(tmp_path, "--launcher", launcher, run="plain", LOCKSTEP_WARM="0")
    assert not any(line[1] for line in seen(tmp_path, "plain"))
    assert warm["params_sha256"] == plain["params_sha256"]
    # A fork has what it touches of the server's memory, and not what the command ever had.
    peaks = [
        max(rank["peak_bytes"] for row in read_events(tmp_path / run / "events.jsonl")
            if row["event"] == "StepDone" for rank in row["ranks"])
        for run in ("run", "plain")
    ]  # fmt: skip
    assert 0.5 < peaks[0] / peaks[1] < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_killed_rank_is_replaced_by_a_forked_one(tmp_path: Path, launcher: str) -> None:
    options = ("--launcher", launcher, "--replace", "1", "steps=400")
    fault = PlannedFault(1, 20)
    done = trained(tmp_path, *options, **to_env([fault], tmp_path / "faults"))
    assert [line[1] for line in seen(tmp_path)] == [False, True, True, True]
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == 1
    plain = trained(tmp_path, *options, run="plain", LOCKSTEP_WARM="0")
    assert done["params_sha256"] == plain["params_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 143),
    ],
)
def test_signals_stop_after_a_step(
    tmp_path: Path, launcher: str, signum: signal.Signals, code: int
) -> None:
    process = command(tmp_path, "--launcher", launcher, "steps=1000000")
    events = tmp_path / "run" / "events.jsonl"
    while not (events.exists() and "StepDone" in events.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    assert all(line[1] for line in seen(tmp_path)[1:])


def test_the_switch_has_two_values(tmp_path: Path) -> None:
    process = command(tmp_path, LOCKSTEP_WARM="no")
    assert process.communicate(timeout=60)[1] == (
        "error: environment variable LOCKSTEP_WARM=no: must be 0 or 1\n"
    )
    assert process.returncode == 2
