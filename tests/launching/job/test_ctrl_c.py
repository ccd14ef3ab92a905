"""Ctrl-C at any moment from the start of a command on, under each launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import TASKS, result, target

from lockstep.engine.checkpoint import listing
from lockstep.launching.job.commands import rank_environment
from lockstep.observe import read_events

LONG = ("steps=1000000", "checkpoint.every=1000000", "eval_every=1000000", "log_every=1")
STEP_S, LATER_STEP_S = 0.2, 1.0
LAST_S = 6.0
"""The last moment to strike at; later where the ranks do not train by then."""


def strike(folder: Path, argv: list[str], delay_s: float, env: dict[str, str]) -> bool:
    """Start a command, press Ctrl-C, and check how it ends; whether a step was committed."""
    folder.mkdir()
    process = subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=rank_environment(1) | env, start_new_session=True,
    )  # fmt: skip
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    found = f"after {delay_s:g} s: exit code {process.returncode}\n{output}\n{errors}"
    assert process.returncode == 130, found
    assert "Traceback" not in output + errors, found
    assert errors.count("\n") <= 1, found
    run_dir = folder / "run"
    events = run_dir / "events.jsonl"
    rows = read_events(events) if events.exists() else []
    steps = [row["step"] for row in rows if row["event"] == "StepDone"]
    if steps:
        ended = result(run_dir)
        assert (ended["status"], ended["exit_code"], ended["step"]) == ("stopped", 130, steps[-1])
        assert listing.folders(run_dir / "checkpoints")[0].name == f"step_{steps[-1]:08d}"
    else:
        assert not listing.folders(run_dir / "checkpoints"), found
        assert errors.strip(), found
    return bool(steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [("python", 1), ("local", 2), ("mpi", 2), ("torchrun", 2)]
)
def test_from_the_start_to_training(tmp_path: Path, launcher: str, num_ranks: int) -> None:
    argv = [sys.executable, "-m", "lockstep", "train", target(), "--run-dir", "run", *LONG]
    argv += ["-n", str(num_ranks), "--launcher", launcher]
    sweep(tmp_path, argv, {})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = TASKS.read_text().replace("import os\n", "import lockstep as ls\nimport os\n", 1)
    script.write_text(
        text.replace("Everything(), run_dir", "Everything(EverythingConfig(steps=1000000, "
        "checkpoint={'every': 1000000}, eval_every=1000000, log_every=1)), run_dir")
    )  # fmt: skip
    sweep(tmp_path, [sys.executable, str(script)], {"RUN_DIR": "run"})


def sweep(folder: Path, argv: list[str], env: dict[str, str]) -> None:
    """Strike ever later, until `LAST_S` and until training has been struck a few times."""
    struck_steps, delay_s = 0, 0.0
    while struck_steps < 3 or delay_s < LAST_S:
        delay_s = round(delay_s + (STEP_S if delay_s < LAST_S else LATER_STEP_S), 1)
        assert delay_s < 10 * LAST_S, "it never trained"
        struck_steps += strike(folder / str(delay_s), argv, delay_s, env)
