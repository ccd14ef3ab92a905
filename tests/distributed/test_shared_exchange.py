"""Gradients that ranks sum in memory they share: the bits of one process, through losses."""

import sys
from pathlib import Path

import pytest
from tests.conftest import result, run, slow, target
from tests.distributed.conftest import same

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TASK = str(Path(__file__).parent / "sliced_tasks.py") + ":Sliced"
KEYS = ("wide=6000", "steps=10", "checkpoint.every=100", "log_every=1")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The result of one process, by further keys."""
    found = {}

    def get(*keys):
        if keys not in found:
            folder = tmp_path_factory.mktemp("reference")
            argv = [sys.executable, "-m", "lockstep", "train", target(), *KEYS, *keys]
            ended = run([*argv, "--run-dir", "run"], folder)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            found[keys] = result(folder / "run")["params_sha256"]
        return found[keys]

    return get


@pytest.fixture
def train(lockstep, tmp_path):
    """Trains on some ranks with faults; returns the run directory."""

    def call(launcher, num_ranks, *keys, faults=()):
        run_dir = tmp_path / "run"
        ended = lockstep(
            "train", target(), "-n", num_ranks, "--launcher", launcher, "--run-dir", run_dir,
            *KEYS, *keys, timeout=150, **to_env(faults, tmp_path / "faults"),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return run_dir

    return call


def chosen(run_dir):
    """Step, way and reason of each choice that was told."""
    rows = read_events(run_dir / "events.jsonl")
    told = [r for r in rows if r["event"] == "ExchangeChosen"]
    return [(r["step"], r["way"], r["reason"]) for r in told]


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [("mpi", 2), ("mpi", 4), ("mpi", 7), ("local", 3), ("torchrun", 2)],
)
@pytest.mark.slow
def test_ranks_that_share_memory_have_the_bits_of_one(train, references, launcher, num_ranks):
    run_dir = train(launcher, num_ranks)
    assert result(run_dir)["params_sha256"] == references()
    assert chosen(run_dir) == [(1, "shared memory", "")]


@pytest.mark.slow
def test_messages_are_sent_if_asked_for(train, references):
    run_dir = train("local", 2, "exchange=messages")
    assert result(run_dir)["params_sha256"] == references()
    assert chosen(run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", slow("local")])
@pytest.mark.parametrize("moment", ["summing", slow("copying"), slow("reduce"), slow("reduced")])
@pytest.mark.parametrize("slot", [slow(0), 1])
def test_a_rank_is_killed_while_it_sums(train, references, launcher, slot, moment):
    """Then another one of those that have regrouped, a moment after it has begun."""
    faults = [PlannedFault(slot, 3, moment), PlannedFault(2, 6, "summing", delay_s=0.001)]
    run_dir = train(launcher, 4, faults=faults)
    found = result(run_dir)
    assert found["params_sha256"] == references()
    assert found["world_size"] == 2
    rows = read_events(run_dir / "events.jsonl")
    assert [r["slot"] for r in rows if r["event"] == "RankLost"] == [slot, 2]
    steps = [step for step, _, _ in chosen(run_dir)]
    assert [way for _, way, _ in chosen(run_dir)] == ["shared memory"] * 3
    assert steps == sorted(set(steps))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize("moment", ["summing", "reduced", "gather"])
def test_a_sharded_optimizer_survives_a_loss_in_the_sum(train, references, launcher, moment):
    keys = ("optimizer.sharded=true", "clip_norm=1.0")
    faults = [PlannedFault(1, 3, moment), PlannedFault(0, 6, "summing")]
    run_dir = train(launcher, 4, *keys, faults=faults)
    assert result(run_dir)["params_sha256"] == references(*keys)
    assert [way for _, way, _ in chosen(run_dir)] == ["shared memory"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_joiner_shares_memory_too(train, references, launcher):
    keys = ("steps=300",)
    faults = [PlannedFault(1, 3, "summing")]
    run_dir = train(launcher, 3, *keys, "--replace", 2, faults=faults)
    found = result(run_dir)
    assert found["params_sha256"] == references(*keys)
    assert found["world_size"] == 3
    assert [way for _, way, _ in chosen(run_dir)] == ["shared memory"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize("keys", [("mesh.pp=2",), ("mesh.tp=2", "optimizer.sharded=true")])
def test_columns_of_a_mesh_share_memory(train_on, reference, tmp_path, launcher, keys):
    """Of six ranks in two columns, one of each is lost in a sum."""
    faults = [PlannedFault(4, 2, "summing"), PlannedFault(1, 5, "summing")]
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, 6, *keys, launcher=launcher, faults=faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)
    assert {way for _, way, _ in chosen(run_dir)} == {"shared memory"}
    assert result(run_dir)["world_size"] == 4
