"""Training a module's `TASK` on meshes of ranks, and what one process makes of it."""

import sys

import pytest
from tests.conftest import result, run

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

CONFIG = (
    "num_shards=4", "batch_size=16", "num_microbatches=8", "steps=8", "clip_norm=1.0", "lr=0.01",
    "eval_every=3", "log_every=1", "checkpoint.every=4", "digest_every=2",
    "checkpoint.file_bytes=3000",
)  # fmt: skip


@pytest.fixture
def train_on(request, lockstep):
    """Trains the module's `TASK`, or another one, on some ranks."""

    def call(run_dir, num_ranks, *overrides, launcher="local", faults=(), target=None):
        return lockstep(
            "train", target or request.module.TASK, "-n", num_ranks, "--launcher", launcher,
            "--run-dir", run_dir, *_config(request), *overrides,
            timeout=150, **to_env(faults, run_dir.with_suffix(".faults")),
        )  # fmt: skip

    return call


@pytest.fixture(scope="module")
def reference_dir(request, tmp_path_factory):
    """The run directory of one process that computes all of the module's `TASK`."""
    folder = tmp_path_factory.mktemp("reference")
    argv = [sys.executable, "-m", "lockstep", "train", request.module.TASK, *_config(request)]
    ended = run([*argv, "--run-dir", "run"], folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def reference(reference_dir):
    """The result of that run."""
    return result(reference_dir)


def _config(request):
    return getattr(request.module, "CONFIG", CONFIG)


def same(run_dir, reference):
    """Assert that a run has the result of another one."""
    there = result(run_dir)
    for key in ("params_sha256", "carry_sha256", "tables_sha256", "metrics"):
        assert there.get(key) == reference.get(key), key


def files(run_dir, step=8):
    """What a run's checkpoint has beside the manifest, by name."""
    folder = run_dir / "checkpoints" / f"step_{step:08}"
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


def check_joiners(train_on, lockstep, task, folder, launcher, *keys, both=()):
    """Assert that a run has the result of one process when joining ranks replace two ranks.

    `keys` are those of the run, `both` also those of the process.
    """
    long = ("batch_size=48", "num_microbatches=24", "steps=80", "eval_every=20", *both)
    alone = lockstep("train", task, *CONFIG, *long, "--run-dir", folder / "alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    planned = [PlannedFault(1, 4), PlannedFault(2, 60, "reduced")]
    run_dir = folder / "run"
    ended = train_on(run_dir, 4, *long, *keys, "--replace", 3, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, result(folder / "alone"))
    rows = read_events(run_dir / "events.jsonl")
    assert sum(row["event"] == "Joined" and row["step"] > 0 for row in rows) == 2
