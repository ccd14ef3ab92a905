"""`--profile`: a trace of each rank, and the same result."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.conftest import result, target

STEPS = ("steps=5", "eval_every=5")


@pytest.fixture(scope="module")
def plain_sha256():
    return {}


@pytest.mark.parametrize(
    "launcher", ["python", *(pytest.param(n, marks=pytest.mark.slow) for n in ("local", "mpi"))]
)
def test_each_rank_writes_a_trace_and_the_result_is_the_same(
    here, tmp_path, plain_sha256, launcher
):
    ranks = 1 if launcher == "python" else 2
    arguments = ("train", target(), "-n", str(ranks), "--launcher", launcher, "--run-dir", "r")
    if not plain_sha256:
        assert here(*arguments, *STEPS).returncode == 0
        assert not (tmp_path / "r" / "profile").exists()
        plain_sha256["sha256"] = result(tmp_path / "r")["params_sha256"]
        shutil.rmtree(tmp_path / "r")
    done = here(*arguments, "--profile-steps", "3:4", *STEPS)
    assert done.returncode == 0, done.stderr
    assert "step 4: profile r/profile/rank0_steps3-4.json" in done.stdout
    assert result(tmp_path / "r")["params_sha256"] == plain_sha256["sha256"]
    for rank in range(ranks):
        trace = json.loads((tmp_path / "r" / "profile" / f"rank{rank}_steps3-4.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert {"step 3", "step 4"} == {name for name in names if name.startswith("step ")}
        assert any("backward" in name.lower() for name in names)


def test_a_session_that_ends_early_writes_what_there_is_or_says_so(here, tmp_path):
    arguments = ("train", target(), "--run-dir", "r", "steps=6")
    done = here(*arguments, "--profile", "stop_at_step=3")
    assert done.returncode == 0, done.stderr
    assert "no profile: this session ended after 3 steps" in done.stdout
    done = here("resume", "r", "--profile-steps", "2:50")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "r" / "profile").iterdir()] == ["rank0_steps5-6.json"]


@pytest.mark.parametrize("steps", ["1:3", "4:3", "3", "a:b", "2:-1", ""])
def test_steps_that_cannot_be(here, steps):
    done = here("train", target(), "--profile-steps", steps)
    assert done.returncode == 2
    assert f"--profile-steps {steps}: must be FIRST:LAST" in done.stderr
