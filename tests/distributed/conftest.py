"""Training a module's `TASK` on meshes of ranks, and what one process makes of it."""

import sys

import pytest
from tests.conftest import result, run

from lockstep.engine.faults import to_env

CONFIG = (
    "num_shards=4", "batch_size=16", "num_microbatches=8", "steps=8", "clip_norm=1.0", "lr=0.01",
    "eval_every=3", "log_every=1", "checkpoint.every=4", "digest_every=2",
)  # fmt: skip


@pytest.fixture
def train_on(request, lockstep):
    """Trains the module's `TASK`, or another one, on some ranks."""

    def call(run_dir, num_ranks, *overrides, launcher="local", faults=(), target=None):
        return lockstep(
            "train", target or request.module.TASK, "-n", num_ranks, "--launcher", launcher,
            "--run-dir", run_dir, *CONFIG, *overrides,
            timeout=150, **to_env(faults, run_dir.with_suffix(".faults")),
        )  # fmt: skip

    return call


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    """The result of one process that computes all of the module's `TASK`."""
    folder = tmp_path_factory.mktemp("reference")
    argv = [sys.executable, "-m", "lockstep", "train", request.module.TASK, *CONFIG]
    ended = run([*argv, "--run-dir", "run"], folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return result(folder / "run")


def same(run_dir, reference):
    """Assert that a run has the result of another one."""
    there = result(run_dir)
    assert there["params_sha256"] == reference["params_sha256"]
    assert there["metrics"] == reference["metrics"]
