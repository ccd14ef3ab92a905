"""Starting ranks on the hosts of a laboratory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from lockstep.errors import ConfigError, LaunchError
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import usable_cores
from lockstep.launching.job.commands import mpirun_command, rank_environment

from .network import INTERFACE, Lab

Launcher = Literal["mpi", "torchrun"]

_PORT = 29_500
_GRACE_S = 10.0
"""How long the others may go on when a rank has failed: they may have something to say."""


@dataclass(frozen=True)
class Outcome:
    """What has become of ranks.

    Attributes:
        exit_code: that of mpirun, or the first one of a rank that was not 0; 0 if all went well.
        seconds: from the start of the launcher to the end of the last rank.
        bytes_between_hosts: what all hosts sent to others meanwhile, with headers; over MPI also
            by the launcher.
    """

    exit_code: int
    seconds: float
    bytes_between_hosts: int


def start_ranks(
    lab: Lab,
    ranks_per_host: int,
    argv: Sequence[str],
    launcher: Launcher = "mpi",
    *,
    timeout_s: float = 600.0,
    output: IO[str] | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command as ranks on all hosts, and wait for its end.

    With `torchrun` each rank is a process with the environment variables that torchrun would set,
    and ranks talk over gloo. With `mpi` there is one mpirun, on the first host.

    Args:
        lab: the hosts.
        ranks_per_host: number of ranks on each, whose numbers follow each other.
        argv: program and arguments of each rank. A program without a folder is looked for beside
            this interpreter first.
        launcher: what starts the ranks.
        timeout_s: seconds after which they are ended.
        output: where they write to; by default, where this process does.
        cwd: the folder they run in; by default, that of this process.
        env: environment variables to start from; by default, those of this process.

    Raises:
        ConfigError: the number of ranks cannot be used, or there is no such program.
        LaunchError: they were not done in time.
        EnvironError: the interfaces do not tell how much went through them.
    """
    if ranks_per_host < 1:
        raise ConfigError(f"lab: ranks={ranks_per_host}: give 1 or more for each host")
    variables = rank_environment(1, env)
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    program = shutil.which(argv[0], path=path) if argv else None
    if program is None:
        raise ConfigError(f"lab: {argv[0] if argv else 'no command'}: there is no such program")
    variables["PATH"] = path
    make = _mpi if launcher == "mpi" else _torchrun
    commands = make(lab, ranks_per_host, [program, *argv[1:]])
    before, started = lab.bytes_between_hosts(), time.perf_counter()
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for command, own in commands:
            process = subprocess.Popen(
                bound_to_parent(command), env={**variables, **own}, cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
            processes.append(process)
        exit_code = _wait(processes, timeout_s)
    seconds = time.perf_counter() - started
    return Outcome(exit_code, seconds, lab.bytes_between_hosts() - before)


def _mpi(
    lab: Lab, ranks_per_host: int, argv: Sequence[str]
) -> list[tuple[list[str], dict[str, str]]]:
    """The mpirun that starts all ranks, and environment variables of its own."""
    num_ranks = lab.num_hosts * ranks_per_host
    program, *rest = mpirun_command(num_ranks, argv, cores=usable_cores()).argv
    hosts = ",".join(f"h{host}:{ranks_per_host}" for host in range(lab.num_hosts))
    flags = ["--host", hosts, "--map-by", f"ppr:{ranks_per_host}:node"]
    flags += ["--prtemca", "plm_ssh_agent", lab.agent()]
    flags += ["--mca", "btl_tcp_if_include", INTERFACE]
    return [(lab.command(0, [program, *flags, *rest]), {})]


def _torchrun(
    lab: Lab, ranks_per_host: int, argv: Sequence[str]
) -> list[tuple[list[str], dict[str, str]]]:
    """The command of each rank, and environment variables of its own."""
    num_ranks = lab.num_hosts * ranks_per_host
    commands = []
    for rank in range(num_ranks):
        host, local_rank = divmod(rank, ranks_per_host)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": ranks_per_host,
            "GROUP_RANK": host,
            "MASTER_ADDR": lab.address(0),
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        own = {name: str(value) for name, value in variables.items()}
        commands.append((lab.command(host, argv), own))
    return commands


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> int:
    """Wait until all have ended; the first exit code that is not 0."""
    failed, deadline = 0, time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        codes = [process.returncode for process in processes]
        if not failed and any(codes):
            failed = next(code for code in codes if code)
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            if failed:
                return failed
            raise LaunchError(
                f"lab: seconds={timeout_s:g}: the ranks are not done; give more with --seconds"
            )
        time.sleep(0.02)
    return failed or next((process.returncode for process in processes if process.returncode), 0)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes that may have ended by themselves: in order, so that mpirun ends its ranks."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.wait()
