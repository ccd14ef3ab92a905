"""Interrupted and resumed on other numbers of ranks: the bits of the uninterrupted run."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.conftest import result, target

ARGUMENTS = (
    "steps=60", "optimizer.weight_decay=0.05", "clip_norm=0.5", "schedule.name=cosine",
    "schedule.warmup_steps=5", "eval_every=7", "log_every=4", "teacher=true",
)  # fmt: skip


@pytest.fixture
def whole(lockstep, tmp_path):
    """The uninterrupted run."""
    done = lockstep("train", target(), "--run-dir", "whole", *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    return tmp_path / "whole"


def rows(run_dir, split):
    with (run_dir / "metrics.csv").open() as file:
        return [r for r in csv.DictReader(file) if r["split"] == split]


@pytest.mark.slow
def test_stopped_on_four_ranks_resumed_on_three_then_one(lockstep, whole, tmp_path):
    first = lockstep(
        "train", target(), "-n", "4", "--run-dir", "parts", *ARGUMENTS, "stop_at_step=37"
    )
    assert first.returncode == 0, first.stderr
    assert result(tmp_path / "parts")["status"] == "stopped"
    assert result(tmp_path / "parts")["step"] == 37
    second = lockstep("resume", "parts", "-n", "3", "stop_at_step=45")
    assert second.returncode == 0, second.stderr
    assert result(tmp_path / "parts")["step"] == 45
    third = lockstep("resume", "parts")
    assert third.returncode == 0, third.stderr

    ended, expected = result(tmp_path / "parts"), result(whole)
    assert ended["status"] == "completed"
    assert ended["params_sha256"] == expected["params_sha256"]
    assert ended["metrics"] == expected["metrics"]
    kept = [(r["step"], r["loss"], r["accuracy"]) for r in rows(tmp_path / "parts", "val")]
    assert kept == [(r["step"], r["loss"], r["accuracy"]) for r in rows(whole, "val")]


def test_resuming_a_finished_run_says_so(lockstep, whole):
    before = result(whole)
    done = lockstep("resume", "whole")
    assert done.returncode == 0
    assert "already complete" in done.stdout
    for key in ("params_sha256", "metrics"):
        assert result(whole)[key] == before[key]


def test_resume_needs_to_be_asked_for(lockstep, whole):
    done = lockstep("train", target(), "--run-dir", "whole", *ARGUMENTS)
    assert done.returncode == 2
    assert "already holds this run up to step_00000060" in done.stderr
    assert "--resume" in done.stderr


def test_a_damaged_checkpoint_is_passed_over(lockstep, whole, tmp_path):
    expected = result(whole)["params_sha256"]
    root = whole / "checkpoints"
    newest = sorted(root.glob("step_*"))[-1] / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    done = lockstep("resume", "whole", "checkpoint.keep=1")
    assert done.returncode == 0, done.stderr
    assert "is damaged" in done.stdout
    assert "the one before is used" in done.stdout
    assert result(whole)["params_sha256"] == expected
    assert (root / "step_00000060" / "manifest.json").exists()
    assert (root / "damaged_step_00000060").exists()


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        pytest.param("python", 1, marks=pytest.mark.slow),
        pytest.param("mpi", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_stops_with_a_checkpoint(lockstep, tmp_path, launcher, num_ranks):
    arguments = ("steps=3000", "checkpoint.every=100000", "eval_every=100000")
    argv = [sys.executable, "-m", "lockstep", "train", target(), "--run-dir", "cut", *arguments]
    argv += ["-n", str(num_ranks), "--launcher", launcher]
    process = subprocess.Popen(
        argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    events = tmp_path / "cut" / "events.jsonl"
    deadline = time.monotonic() + 60
    while not (events.exists() and "StepDone" in events.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    stopped = result(tmp_path / "cut")
    assert (stopped["status"], stopped["reason"]) == ("stopped", "interrupted")
    assert (tmp_path / "cut" / "checkpoints" / f"step_{stopped['step']:08d}").is_dir()
    step = stopped["step"] + 3
    again = lockstep("resume", "cut", f"stop_at_step={step}")
    assert again.returncode == 0, again.stderr
    assert result(tmp_path / "cut")["step"] == step
    straight = lockstep(
        "train", target(), "--run-dir", "straight", *arguments, f"stop_at_step={step}"
    )
    assert straight.returncode == 0, straight.stderr
    assert (
        result(tmp_path / "straight")["params_sha256"] == result(tmp_path / "cut")["params_sha256"]
    )


@pytest.mark.slow
def test_a_script_under_the_launcher_and_alone(lockstep, ranks, tmp_path):
    script = target().rpartition(":")[0]
    done = lockstep("train", script, "-n", "2", "--run-dir", "by launcher é", "steps=9")
    assert done.returncode == 0, done.stderr
    alone = ranks("mpi", 3, script, RUN_DIR=str(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    assert result(tmp_path / "alone")["step"] == 14
    again = lockstep("train", target(), "--run-dir", "task", "steps=9")
    assert again.returncode == 0, again.stderr
    launched = result(tmp_path / "by launcher é")
    assert launched["step"] == 9
    assert launched["world_size"] == 2
    assert launched["params_sha256"] == result(tmp_path / "task")["params_sha256"]


def test_a_run_whose_checkpoints_have_gone_does_not_start_over(here, tmp_path):
    assert here("train", target(), "--run-dir", "run", "steps=2").returncode == 0
    root = tmp_path / "run" / "checkpoints"
    assert (root / "best").read_text() == "step_00000002\n"
    (root / "best").unlink()  # as if killed between the two
    (root / "step_00000002").rename(root / ".step_00000002.7.old")
    done = here("resume", "run")
    assert done.returncode == 0
    assert "already complete" in done.stdout
    assert (root / "best").read_text() == "step_00000002\n"
    (root / "step_00000002").rename(tmp_path / "elsewhere")
    done = here("resume", "run")
    assert done.returncode == 2
    assert "put one back, or delete this folder to start over from step 0" in done.stderr
    assert "latest: names step_00000002, which is missing" in done.stderr
