"""Gradients summed host by host, on network namespaces: bits, bytes, and a host that goes away."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.lab import Lab, start_ranks
from tests.conftest import environment, result

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.observe import read_events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_has_what_hosts_need")]

ENVIRONMENT = environment(cold=True)
SUMS = Path(__file__).parents[2] / "benchmarks" / "host_sums.py"
TRAIN = ("lockstep", "train", "digits", "steps=6", "num_microbatches=10", "log_every=1")
SMALL, LARGE = ("hidden=16",), ("hidden=1024",)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The result of one rank, by further keys."""
    found = {}

    def get(keys):
        if keys not in found:
            folder = tmp_path_factory.mktemp("alone")
            argv = [sys.executable, "-m", *TRAIN, *keys, "--run-dir", "run"]
            subprocess.run(argv, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
            found[keys] = result(folder / "run")["params_sha256"]
        return found[keys]

    return get


def train(lab, ranks_per_host, launcher, folder, *keys, faults=()):
    """Trains on the ranks of a lab; returns what has become of them, and the run directory."""
    env = {**ENVIRONMENT, **to_env(faults, folder / "faults")}
    with (folder / "said").open("w") as said:
        ended = start_ranks(
            lab, ranks_per_host, [*TRAIN, *keys, "--run-dir", "run"], launcher, cwd=folder,
            env=env, output=said,
        )  # fmt: skip
    assert ended.exit_code == 0, (folder / "said").read_text()
    return ended, folder / "run"


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@pytest.mark.parametrize("keys", [SMALL, LARGE])
@pytest.mark.parametrize("exchange", ["hierarchical", "auto"])
def test_a_training_over_hosts_of_two_ranks_has_the_bits_of_one(
    references, launcher, keys, exchange, tmp_path
):
    with Lab(3, "1gbit") as lab:
        _, run_dir = train(lab, 2, launcher, tmp_path, f"exchange={exchange}", *keys)
    assert result(run_dir)["params_sha256"] == references(keys)
    told = [r for r in read_events(run_dir / "events.jsonl") if r["event"] == "ExchangeChosen"]
    if exchange == "hierarchical":
        assert [(r["step"], r["way"]) for r in told] == [(1, "hierarchical")]


def test_half_of_the_bytes_or_fewer_go_between_four_hosts_of_two_ranks(tmp_path):
    out = tmp_path / "found.json"
    sizes = ["--parameters", "9217", "800000", "--microbatches", "8", "20"]
    effort = ["--repeats", "2", "--seconds", "0.1", "--out", str(out)]
    with Lab(4) as lab, (tmp_path / "said").open("w") as said:
        argv = [sys.executable, str(SUMS), *sizes, *effort]
        ended = start_ranks(lab, 2, argv, "mpi", env=ENVIRONMENT, output=said)
    assert ended.exit_code == 0, (tmp_path / "said").read_text()
    cases = json.loads(out.read_text())
    assert len(cases) == 4
    for case in cases:
        flat, by_host = case["flat"], case["hierarchical"]
        assert flat["sum"] == by_host["sum"]
        # A few acknowledgements more or fewer are the network's.
        assert min(by_host["bytes"]) <= 0.51 * min(flat["bytes"]), case


@pytest.mark.parametrize("keys", [SMALL, LARGE])
def test_the_others_go_on_when_a_host_is_gone(references, keys, tmp_path):
    """Both of its ranks are killed, the one that speaks for it while it is about to."""
    faults = [PlannedFault(2, 2, "between"), PlannedFault(3, 2, "between")]
    with Lab(3) as lab:
        _, run_dir = train(lab, 2, "mpi", tmp_path, "exchange=hierarchical", *keys, faults=faults)
    found = result(run_dir)
    assert (found["params_sha256"], found["world_size"]) == (references(keys), 4)
    rows = read_events(run_dir / "events.jsonl")
    assert sorted(r["slot"] for r in rows if r["event"] == "RankLost") == [2, 3]
    ways = [(r["way"], r["reason"]) for r in rows if r["event"] == "ExchangeChosen"]
    assert ways[-1] == ("hierarchical", "the ranks are on 2 hosts")
