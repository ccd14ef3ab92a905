from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import WARM, run

from lockstep.cli.clusters.comm_profile import profile_of
from lockstep.errors import LaunchError, RankFailure
from lockstep.launching.job.commands import (
    RankCommand,
    local_command,
    mpirun_command,
    python_command,
    torchrun_command,
)
from lockstep.planning.operations import OPERATIONS
from lockstep.planning.profile import read_profile

SOURCE = Path(__file__).parents[2] / "src"


def test_ranks_that_say_why_they_end_are_quoted(tmp_path: Path) -> None:
    def ends(code: str) -> RankCommand:
        return python_command([sys.executable, "-c", code])

    with pytest.raises(LaunchError, match=r"^no room$") as raised:
        profile_of(ends("import sys; print('error: no room', file=sys.stderr); sys.exit(2)"), 1.0)
    assert raised.value.exit_code == 2
    with pytest.raises(RankFailure, match=r"exit code 3\): boom;"):
        profile_of(ends("import sys; print('boom', file=sys.stderr); sys.exit(3)"), 1.0)
    with pytest.raises(RankFailure, match="they said nothing"):
        profile_of(ends("print('{}')"), 1.0)


def check_real(path: Path, transport: str) -> None:
    """What must hold of a profile that real ranks have measured."""
    profile = read_profile(path)
    assert (profile.transport, profile.num_ranks, profile.device) == (transport, 2, "cpu")
    assert profile.torch_backend == ("mpi4py" if transport == "mpi" else "gloo")
    found = {f"{m.layer}/{m.operation}": m for m in profile.measurements}
    assert set(found) == set(OPERATIONS)
    assert {m.scope for m in profile.measurements} == {"inside"}
    for measurement in profile.measurements:
        assert measurement.points


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local", "torchrun"])
def test_two_ranks_measure_everything(here: Any, tmp_path: Path, launcher: str) -> None:
    done = here(
        "comm-profile", "-n", "2", "--launcher", launcher, "--sizes", "1KB,4KB", "--seconds", "0.5",
        "--device", "cpu", "--json", "profile.json", "--plot", "profile.svg",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_real(tmp_path / "profile.json", "mpi" if launcher == "mpi" else "gloo")
    assert "torch/all_reduce" in done.stdout
    assert "profile  profile.json" in done.stdout
    assert (tmp_path / "profile.svg").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["profile.json", "profile.svg"]


COMMAND = [sys.executable, "-m", "lockstep", "comm-profile", "--sizes", "1KB,4KB", "--seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_ranks_of_an_outer_launcher_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    argv = [*COMMAND, "1", "--device", "cpu", "--json", str(tmp_path / "profile.json")]
    command = torchrun_command(2, argv)
    if launcher == "mpi":
        command = mpirun_command(2, argv, cores=2, one_host=True)
    done = run(command.argv, tmp_path, PYTHONPATH=str(SOURCE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("inside a host, 2 ranks") == 1
    check_real(tmp_path / "profile.json", "mpi" if launcher == "mpi" else "gloo")


@pytest.mark.slow
def test_a_file_that_rank_0_cannot_write_ends_all_ranks(tmp_path: Path) -> None:
    argv = [*COMMAND, "60", "--device", "cpu", "--json", "/nowhere/profile.json"]
    command = mpirun_command(2, argv, cores=2, one_host=True)
    done = run(command.argv, tmp_path, timeout=60, PYTHONPATH=str(SOURCE))
    assert done.returncode == 2
    assert done.stderr.count("error: /nowhere/profile.json: cannot be written") == 1


DYING = """
import os, signal, sys
from lockstep.cli.clusters import comm_profile_meter as meter
from lockstep.cli.clusters import comm_profile_rank as rank

RANKS = ("LOCKSTEP_LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
times, calls = meter.Meter.times, []

def dying(self, timed, allowed_s):
    calls.append(timed)
    if len(calls) == 5 and next(os.environ[name] for name in RANKS if name in os.environ) == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return times(self, timed, allowed_s)

meter.Meter.times = dying
sys.exit(rank.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("launcher", "start"),
    [
        pytest.param("local", local_command, marks=pytest.mark.slow),
        ("mpi", lambda n, argv: mpirun_command(n, argv, cores=2, one_host=True)),
        pytest.param("torchrun", torchrun_command, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_in_the_middle_ends_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    start: Callable[[int, list[str]], RankCommand],
) -> None:
    for name, value in WARM.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    request = '{"sizes": [1024, 4096], "seconds": 60, "device": "cpu"}'
    with pytest.raises(RankFailure, match="comm-profile: ") as raised:
        profile_of(start(2, [sys.executable, str(script), request]), 60.0)
    if launcher != "torchrun":  # which may end the other rank before it can say anything
        assert "a rank was lost or has failed while lockstep/" in str(raised.value)
    assert raised.value.exit_code == 75
