"""Gradients that are summed host by host: the bits of one process, through losses.

The hosts are invented, so that ranks can be killed under every launcher; `tests/lab` has real ones.
"""

import sys
from pathlib import Path

import pytest
from tests.conftest import result, run, slow
from tests.distributed.conftest import CONFIG, same

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

TASK = str(Path(__file__).parent / "hosted_tasks.py") + ":Hosted"
KEYS = ("steps=12", "num_microbatches=7", "checkpoint.every=100", "log_every=1")
SMALL, LARGE = (), ("wide=6000",)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The result of one process, by further keys."""
    found = {}

    def get(*keys):
        if keys not in found:
            folder = tmp_path_factory.mktemp("reference")
            argv = [sys.executable, "-m", "lockstep", "train", TASK, *KEYS, *keys]
            ended = run([*argv, "--run-dir", "run"], folder)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            found[keys] = result(folder / "run")["params_sha256"]
        return found[keys]

    return get


@pytest.fixture
def train(lockstep, tmp_path):
    """Trains on ranks of hosts of these names with faults; returns the run directory."""

    def call(launcher, hosts, *keys, faults=(), exchange="hierarchical"):
        run_dir = tmp_path / "run"
        ended = lockstep(
            "train", TASK, "-n", len(hosts.split()), "--launcher", launcher, "--run-dir", run_dir,
            *KEYS, f"exchange={exchange}", *keys, timeout=150, LOCKSTEP_TEST_HOSTS=hosts,
            **to_env(faults, tmp_path / "faults"),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return run_dir

    return call


def chosen(run_dir):
    """Way and reason of each choice that was told."""
    rows = read_events(run_dir / "events.jsonl")
    return [(r["way"], r["reason"]) for r in rows if r["event"] == "ExchangeChosen"]


@pytest.mark.parametrize("keys", [SMALL, slow(LARGE)])
@pytest.mark.parametrize(
    ("launcher", "hosts"),
    [("mpi", "a a b b"), slow("local", "a a a b"), slow("torchrun", "a b b"),
     slow("mpi", "a b b c c c d")],
)  # fmt: skip
def test_sums_host_by_host_have_the_bits_of_one_process(train, references, launcher, hosts, keys):
    run_dir = train(launcher, hosts, *keys)
    assert result(run_dir)["params_sha256"] == references(*keys)
    assert chosen(run_dir) == [
        ("hierarchical", f"the ranks are on {len(set(hosts.split()))} hosts")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize(
    ("keys", "moment"),
    [(SMALL, "reduce"), (SMALL, "between"), (SMALL, "reduced"), (LARGE, "summing"),
     (LARGE, "between"), (LARGE, "copying"), (LARGE, "reduced")],
)  # fmt: skip
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_rank_is_killed_while_hosts_sum(train, references, launcher, keys, moment, slot):
    """One that speaks for its host, and others; then another one, a moment after it has begun."""
    faults = [PlannedFault(slot, 3, moment), PlannedFault(4, 8, "reduce", delay_s=0.001)]
    run_dir = train(launcher, "a a b b b", *keys, faults=faults)
    found = result(run_dir)
    assert found["params_sha256"] == references(*keys)
    assert found["world_size"] == 3
    rows = read_events(run_dir / "events.jsonl")
    assert [r["slot"] for r in rows if r["event"] == "RankLost"] == [slot, 4]
    assert {way for way, _ in chosen(run_dir)} == {"hierarchical"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize("keys", [SMALL, LARGE])
def test_a_host_is_lost_as_a_whole(train, references, launcher, keys):
    faults = [PlannedFault(slot, 4, "between") for slot in (2, 3)]
    run_dir = train(launcher, "a a b b c c", *keys, faults=faults)
    found = result(run_dir)
    assert found["params_sha256"] == references(*keys)
    assert found["world_size"] == 4
    assert chosen(run_dir)[-1] == ("hierarchical", "the ranks are on 2 hosts")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
@pytest.mark.parametrize("moment", ["summing", "between", "reduced", "gather", "gathered"])
def test_a_sharded_optimizer_goes_host_by_host_too(train, references, launcher, moment):
    keys = ("optimizer.sharded=true", "clip_norm=1.0", *LARGE)
    faults = [PlannedFault(1, 3, moment), PlannedFault(2, 8, moment)]
    run_dir = train(launcher, "a a a b b", *keys, faults=faults)
    assert result(run_dir)["params_sha256"] == references(*keys)
    assert chosen(run_dir)[0] == ("hierarchical", "the ranks are on 2 hosts")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
@pytest.mark.parametrize("keys", [LARGE, (*LARGE, "bucket_bytes=40000")])
def test_ranks_with_a_host_each_are_killed_while_gradients_travel(
    train, references, launcher, keys
):
    """In the last backward pass, the second time after another one has begun to exchange."""
    faults = [PlannedFault(1, 3, "summing"), PlannedFault(3, 8, "summing", delay_s=0.001)]
    run_dir = train(launcher, "a b c d", *keys, faults=faults, exchange="auto")
    found = result(run_dir)
    assert found["params_sha256"] == references(*LARGE)
    assert found["world_size"] == 2
    assert all("last backward pass" in reason for _, reason in chosen(run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local", "torchrun"])
@pytest.mark.parametrize("keys", [SMALL, LARGE])
def test_the_way_is_chosen_by_trying(train, references, launcher, keys):
    run_dir = train(launcher, "a a b b", *keys, exchange="auto")
    assert result(run_dir)["params_sha256"] == references(*keys)
    [(way, reason)] = chosen(run_dir)
    assert way in ("hierarchical", "messages")
    assert reason.startswith("the ranks are on 2 hosts; an exchange took ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "exchange", "told"),
    [
        ("a a b a", "hierarchical", "not host by host: ranks of one host do not follow each other"),
        ("a b c", "auto", "not host by host: no two ranks that follow each other share a host"),
        ("a a b", "flat", "the ranks are on 2 hosts"),
    ],
)
def test_what_is_not_summed_host_by_host_says_why(train, references, hosts, exchange, told):
    run_dir = train("local", hosts, exchange=exchange)
    assert result(run_dir)["params_sha256"] == references()
    [(way, reason)] = chosen(run_dir)
    assert way == "messages"
    assert reason.endswith(told)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_columns_of_a_mesh_have_hosts_of_their_own(lockstep, tmp_path, launcher):
    """Of three replicas on two hosts, a rank of the first host is lost."""
    deep = TASK.replace("Hosted", "HostedDeep")
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    ended = lockstep("train", deep, *CONFIG, "--run-dir", alone)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ended = lockstep(
        "train", deep, "-n", 6, "--launcher", launcher, "--run-dir", run_dir, *CONFIG,
        "mesh.tp=2", "exchange=hierarchical", timeout=150, LOCKSTEP_TEST_HOSTS="a a a a b b",
        **to_env([PlannedFault(3, 3, "between")], tmp_path / "faults"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, result(alone))
    assert chosen(run_dir)[0] == ("hierarchical", "the ranks are on 2 hosts")
    rows = read_events(run_dir / "events.jsonl")
    assert [r["slot"] for r in rows if r["event"] == "RankLost"] == [3]
