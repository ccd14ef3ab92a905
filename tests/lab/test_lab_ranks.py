"""Ranks on hosts of network namespaces: where they are, how they end, what they compute."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.lab import Lab, start_ranks
from benchmarks.lab.leftovers import FILES
from tests.conftest import environment, result

from lockstep.errors import ConfigError, LaunchError
from lockstep.planning.profile import read_profile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_has_what_hosts_need")]

# Interpreters that a warm process forks would not be on the host.
ENVIRONMENT = environment(cold=True)

ROOT = Path(__file__).parents[2]
GATHER = """
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
found = numpy.empty((world.size, 1 << 20), numpy.uint8)
for _ in range(10):
    world.Allgather(numpy.full(1 << 20, world.rank, numpy.uint8), found)
assert (found == numpy.arange(world.size)[:, None]).all()
"""
BOTH_WAYS = """
import time
import torch
from lockstep.comm.mpi.transport import MpiTransport
transport = MpiTransport()
own, other = torch.ones(5_000_000, dtype=torch.uint8), torch.empty(2_500_000, dtype=torch.uint8)
half, to = 2_500_000, 1 - transport.rank
counts = [0, half] if to else [half, 0]
found = []
for _ in range(5):
    transport.barrier()
    began = time.perf_counter()
    transport.all_to_all(own, counts, [0, 0], other, counts)
    transport.barrier()
    found.append(time.perf_counter() - began)
if transport.rank == 0:
    print("took", *found, flush=True)
transport.close()
"""
MEET = """
from datetime import timedelta
from mpi4py import MPI
from lockstep.comm.backend.world import create_store
store = create_store(MPI.COMM_WORLD, timedelta(seconds=30))
store.set(f"from {MPI.COMM_WORLD.rank}", "x")
assert store.get(f"from {1 - MPI.COMM_WORLD.rank}") == b"x"
MPI.COMM_WORLD.barrier()
"""


def test_what_mpi_moves_between_hosts_goes_through_their_interfaces(tmp_path):
    argv = [sys.executable, "-c", GATHER]
    with Lab(2) as lab, (tmp_path / "said").open("w") as said:
        ended = start_ranks(lab, 1, argv, "mpi", env=ENVIRONMENT, output=said)
    assert ended.exit_code == 0, (tmp_path / "said").read_text()
    assert 20 << 20 < ended.bytes_between_hosts < 22 << 20
    with Lab(1) as lab:
        inside = start_ranks(lab, 2, argv, "mpi", env=ENVIRONMENT)
    assert (inside.exit_code, inside.bytes_between_hosts) == (0, 0)


def test_large_messages_go_both_ways_at_once(tmp_path):
    argv = [sys.executable, "-c", BOTH_WAYS]
    with Lab(2, "100mbit") as lab, (tmp_path / "said").open("w") as said:
        ended = start_ranks(lab, 1, argv, "mpi", env=ENVIRONMENT, output=said)
    text = (tmp_path / "said").read_text()
    assert ended.exit_code == 0, text
    (line,) = (line for line in text.splitlines() if "took" in line)
    seconds = sorted(map(float, line.split("took")[1].split()))
    # 2.5 MB take 0.2 s, and twice that if the ranks take turns.
    assert seconds[0] > 0.19
    assert seconds[-2] < 0.35, seconds


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_ranks_are_where_they_should_be(launcher, tmp_path):
    prefix = "OMPI_COMM_WORLD_" if launcher == "mpi" else ""
    local = "LOCAL_SIZE" if launcher == "mpi" else "LOCAL_WORLD_SIZE"
    size = "SIZE" if launcher == "mpi" else "WORLD_SIZE"
    names = [prefix + name for name in ("RANK", size, "LOCAL_RANK", local)]
    code = (
        "import os, socket, sys; place = [os.environ[n] for n in sys.argv[1:]];"
        "open(place[0], 'w').write(' '.join([socket.gethostname(), *place]))"
    )
    with Lab(3) as lab:
        argv = [sys.executable, "-c", code, *names]
        ended = start_ranks(lab, 2, argv, launcher, cwd=tmp_path, env=ENVIRONMENT)
    assert ended.exit_code == 0
    for rank in range(6):
        host, local_rank = divmod(rank, 2)
        assert (tmp_path / str(rank)).read_text() == f"h{host} {rank} 6 {local_rank} 2"


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_the_exit_code_is_that_of_the_rank_that_fails(launcher, tmp_path):
    variable = "OMPI_COMM_WORLD_RANK" if launcher == "mpi" else "RANK"
    code = (
        f"import os, sys, time; sys.exit(7) if os.environ[{variable!r}] == '1' else time.sleep(3)"
    )
    with Lab(2) as lab, (tmp_path / "said").open("w") as said:
        argv = [sys.executable, "-c", code]
        ended = start_ranks(lab, 1, argv, launcher, env=ENVIRONMENT, output=said)
    assert ended.exit_code == 7


def test_what_cannot_be_started_is_said():
    with Lab(1) as lab:
        with pytest.raises(ConfigError, match="no-such-thing: there is no such program"):
            start_ranks(lab, 1, ["no-such-thing"])
        with pytest.raises(ConfigError, match="ranks=0: give 1 or more"):
            start_ranks(lab, 0, ["hostname"])
        with pytest.raises(LaunchError, match=r"seconds=0\.5: the ranks are not done; give more"):
            start_ranks(lab, 1, ["sleep", "30"], "torchrun", timeout_s=0.5)


def test_ranks_of_mpi_meet_where_names_are_unknown_and_no_way_leads_out(tmp_path):
    with Lab(2) as lab, (tmp_path / "said").open("w") as said:
        for host in range(2):
            (FILES / f"{lab.name}-h{host}" / "hosts").write_text("127.0.0.1 localhost\n")
        argv = [sys.executable, "-c", MEET]
        ended = start_ranks(lab, 1, argv, "mpi", env=ENVIRONMENT, output=said)
    assert ended.exit_code == 0, (tmp_path / "said").read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of a training on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    argv = [sys.executable, "-m", "lockstep", "train", "digits", "steps=5", "--run-dir", "run"]
    subprocess.run(argv, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return result(folder / "run")


@pytest.mark.parametrize(
    ("launcher", "hosts", "ranks_per_host", "shape"),
    [
        ("mpi", 2, 1, "100mbit"),
        ("torchrun", 2, 1, "100mbit"),
        ("mpi", 2, 2, "lossy"),
        ("torchrun", 3, 1, "rate=50mbit,delay=2ms,loss=1%"),
    ],
)
def test_a_training_over_hosts_is_that_on_one_rank(
    alone, launcher, hosts, ranks_per_host, shape, tmp_path
):
    argv = ["lockstep", "train", "digits", "steps=5", "--run-dir", "run"]
    with Lab(hosts, shape) as lab, (tmp_path / "said").open("w") as said:
        ended = start_ranks(
            lab, ranks_per_host, argv, launcher, cwd=tmp_path, env=ENVIRONMENT,
            output=said,
        )  # fmt: skip
    assert ended.exit_code == 0, (tmp_path / "said").read_text()
    assert result(tmp_path / "run")["params_sha256"] == alone["params_sha256"]
    assert ended.bytes_between_hosts > 5 * 4 * 1000
    joined = [
        row for row in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if row["event"] == "Joined"
    ]  # fmt: skip
    assert {row["host"] for row in joined} == {f"h{host}" for host in range(hosts)}


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_profile_tells_inside_and_between_hosts_apart(launcher, tmp_path):
    argv = ["lockstep", "comm-profile", "--sizes", "1KB,4KB", "--seconds", "2", "--json", "p.json"]
    with Lab(2, "rate=1gbit,delay=5ms") as lab, (tmp_path / "said").open("w") as said:
        ended = start_ranks(lab, 2, argv, launcher, cwd=tmp_path, env=ENVIRONMENT, output=said)
    assert ended.exit_code == 0, (tmp_path / "said").read_text()
    profile = read_profile(tmp_path / "p.json")
    times = {}
    for scope in ("inside", "between", "all"):
        found = profile.find("lockstep", "message", scope)
        assert found is not None
        times[scope] = found.points[0].median_s
    assert times["inside"] < 0.004
    assert times["between"] >= 0.005
    assert times["all"] >= 0.005
    gather = profile.find("lockstep", "all_gather", "between")
    assert gather is not None
    # One delay; gloo sends only what its receiver has asked for, which takes another. It would be
    # up to one more where ranks begin when they have heard that all have come.
    num_delays = 1 if launcher == "mpi" else 2
    assert 0.005 <= gather.points[0].median_s < 0.005 * num_delays + 0.0035


def test_the_command_prints_time_and_bytes():
    argv = [sys.executable, "-m", "benchmarks.lab", "--hosts", "2", "--ranks", "2"]
    argv += ["--shape", "delay=1ms", "--launcher", "torchrun", "--", "hostname"]
    done = subprocess.run(argv, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *names, last = done.stdout.splitlines()
    assert sorted(names) == ["h0", "h0", "h1", "h1"]
    assert last.startswith("lab: 2 hosts × 2 ranks over torchrun, delay=1ms, delay and loss by ")
    assert last.endswith(" s, 0 bytes between hosts, exit code 0")


def test_the_command_refuses_a_shape_in_one_line():
    argv = [sys.executable, "-m", "benchmarks.lab", "--shape", "wan", "--", "hostname"]
    done = subprocess.run(argv, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: shape 'wan': ")
    assert done.stderr.count("\n") == 1
