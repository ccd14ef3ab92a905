"""The launcher that started this process, and its place among the ranks.

Launchers pass both in environment variables. This module only reads these, so it can be tested
without launching anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep.config.parsing import parse_int, shown
from lockstep.errors import EnvironError
from lockstep.launching.host import supervisor as local

Launcher = Literal["python", "local", "mpi", "torchrun", "slurm"]

# SLURM numbers what is no `srun` step (batch script, interactive shell, …) from here on.
_FIRST_SPECIAL_STEP = 0xFFFF_FFFA
REPLACE = "LOCKSTEP_MPI_REPLACE"
"""Variable of ranks under mpirun: the number of killed ones that may be replaced."""

SLOT, SIZE = "LOCKSTEP_MPI_SLOT", "LOCKSTEP_MPI_SIZE"
"""Variables of a process that ranks under mpirun have started: its number, and the number of ranks
at the start."""

# Below the ports that Linux gives to outgoing connections (32768 and up).
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000

# SLURM's compressed host lists, such as rack[1-2]node[01-03,07],login.
_NUMBER = r"\d{1,18}"
_GROUP = rf"\[{_NUMBER}(?:-{_NUMBER})?(?:,{_NUMBER}(?:-{_NUMBER})?)*\]"
_HOST = rf"(?:[^][,\s]|{_GROUP})+"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)


@dataclass(frozen=True)
class Environment:
    """The place of a process among the ranks.

    Attributes:
        launcher: launcher that started the ranks; `torchrun` stands for all that set its variables.
        rank: rank of this process.
        world_size: number of ranks.
        local_rank: number of this process among those on its host, from 0.
        local_world_size: number of ranks on its host.
        master_addr: host of rank 0, where ranks meet over TCP; None where they do not.
        master_port: TCP port on that host; None where there is none.
        joins: whether this process joins ranks that began without it.
        replacements: greatest number of killed ranks that the ranks replace themselves.
        supervisor_fd: file descriptor of the inherited socket to Lockstep's own supervisor or
            agent; None under other launchers.
        address: address of this host that other ranks reach, where `supervisor_fd` is set.
        host_timeout_s: seconds after which the agents take a silent host to be lost.
    """

    launcher: Launcher = "python"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    supervisor_fd: int | None = None
    joins: bool = False
    replacements: int = 0
    address: str = local.HOST
    host_timeout_s: int = 0

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on its host."""
        return self.local_world_size == self.world_size


def detect(env: Mapping[str, str]) -> Environment:
    """Find out which launcher started this process, and its place among the ranks.

    The first of these that applies:

    1. **Lockstep's own launcher** (`LOCKSTEP_LOCAL_*`), which runs inside whatever
       else there is.
    2. **torchrun** (`TORCHELASTIC_RUN_ID`), wherever it runs itself: its agents may have been
       started by `srun` or `mpirun`. So does `RANK` with a `WORLD_SIZE` above 1, set by hand or
       by another launcher of that convention; `MASTER_ADDR` and `MASTER_PORT` must then be set.
       A `WORLD_SIZE` of 1 says nothing: container images leave it behind.
    3. **MPI**: `OMPI_COMM_WORLD_*` (Open MPI), `PMI_*` with `MPI_LOCALRANKID` (MPICH, Intel MPI),
       `PMIX_RANK` inside a SLURM step (`srun --mpi=pmix`). `mpirun` inside a SLURM allocation is
       MPI: what SLURM says there describes mpirun's daemons. `PMI_RANK` alone is not MPI: with
       `MpiDefault=pmi2`, SLURM sets it for every program.
    4. **SLURM step** (`srun`): ranks meet over TCP at the step's first host, at a port derived
       from the job and step; a user's `MASTER_ADDR` and `MASTER_PORT` come first. A batch script
       and an interactive shell are no steps: a plain `python` there is one process.
    5. Plain **python**: one process.

    A pod of an Indexed Job of Kubernetes (`JOB_COMPLETION_INDEX`) with a `WORLD_SIZE` has the rank
    of its index, by the convention of 2.

    Where a `WORLD_SIZE` or `RANK` goes with 3 or 4 it must agree with what these say.

    Raises:
        EnvironError: variables are half set, out of range or contradict each other.
    """
    if any(name in env for name in local.VARIABLES):
        return _local(env)
    if "TORCHELASTIC_RUN_ID" in env:
        return _torchrun(env, "start with torchrun, or unset TORCHELASTIC_RUN_ID")
    env = _indexed(env)
    inner = _mpi(env) or _slurm_step(env) or Environment()
    return _hand_made(env, inner) or inner


def _indexed(env: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, with the `RANK` that the index of a pod stands for."""
    if "JOB_COMPLETION_INDEX" not in env or "WORLD_SIZE" not in env or "RANK" in env:
        return env
    advice = "Kubernetes sets it in pods of an Indexed Job: unset it elsewhere"
    size = _number(env, "WORLD_SIZE", "set it to the Job's completions", low=1)
    rank = _number(env, "JOB_COMPLETION_INDEX", advice, below=size, limit="WORLD_SIZE")
    return {**env, "RANK": str(rank)}


def _local(env: Mapping[str, str]) -> Environment:
    advice = f"Lockstep's own launchers set it: unset all {local.PREFIX}*"
    size = _number(env, local.SIZE, advice, low=1)
    joins = local.PLACE in env
    place = _number(env, local.PLACE if joins else local.RANK, advice, below=size, limit=local.SIZE)
    per_host = size
    if local.RANKS in env:
        limit = f"{local.SIZE}+1"
        per_host = _number(env, local.RANKS, advice, low=1, below=size + 1, limit=limit)
    return Environment(
        launcher="local",
        rank=_number(env, local.RANK, advice),
        world_size=size,
        local_rank=place % per_host,
        local_world_size=per_host,
        master_addr=env.get(local.STORE, local.HOST),
        master_port=_number(env, local.PORT, advice, low=1, below=65_536, limit="ports"),
        supervisor_fd=_number(env, local.SUPERVISOR, advice),
        joins=joins,
        address=env.get(local.ADDRESS, local.HOST),
        host_timeout_s=_number(env, local.TIMEOUT, advice) if local.TIMEOUT in env else 0,
    )


def _torchrun(env: Mapping[str, str], advice: str) -> Environment:
    size = _number(env, "WORLD_SIZE", advice, low=1)
    rank = _number(env, "RANK", advice, below=size, limit="WORLD_SIZE")
    # By hand, people set these two only where there are several ranks on a host.
    local_rank = 0
    if "LOCAL_RANK" in env or "TORCHELASTIC_RUN_ID" in env:
        local_rank = _number(env, "LOCAL_RANK", advice, below=size, limit="WORLD_SIZE")
    local_size = local_rank + 1
    if "LOCAL_WORLD_SIZE" in env:
        bounds = {"low": local_rank + 1, "below": size + 1}
        local_size = _number(env, "LOCAL_WORLD_SIZE", advice, **bounds, limit="WORLD_SIZE+1")
    return Environment(
        launcher="torchrun",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        master_addr=_text(env, "MASTER_ADDR", f"it is the host of rank 0: {advice}"),
        master_port=_port(env),
    )


def _hand_made(env: Mapping[str, str], inner: Environment) -> Environment | None:
    """The place according to RANK and WORLD_SIZE, if they add ranks to `inner`."""
    if "WORLD_SIZE" not in env:
        if "RANK" in env:
            _agrees(env, "RANK", inner.rank, inner)
        return None
    size = _number(env, "WORLD_SIZE", "unset it to run one process", low=1)
    if "RANK" not in env:
        if size > 1:
            _agrees(env, "WORLD_SIZE", inner.world_size, inner)
        return None
    advice = "unset RANK and WORLD_SIZE if they are left over from something else"
    rank = _number(env, "RANK", advice, below=size, limit="WORLD_SIZE")
    if size == 1:
        return None
    # Each process of an outer launcher may start several ranks of its own, numbered in blocks.
    if rank * inner.world_size // size != inner.rank:
        raise _wrong(
            env,
            "RANK",
            f"of WORLD_SIZE={size} contradicts {inner.launcher}, which calls this process rank "
            f"{inner.rank} of {inner.world_size}",
            advice,
        )
    return _torchrun(env, advice)


def _agrees(env: Mapping[str, str], name: str, value: int, inner: Environment) -> None:
    """Check a lone RANK or WORLD_SIZE against the launcher's own variables."""
    other = "WORLD_SIZE" if name == "RANK" else "RANK"
    if inner.launcher == "python":
        raise _wrong(env, name, f"is set, {other} is not", "set both, or unset it")
    if _number(env, name, "unset it") != value:
        raise _wrong(env, name, f"contradicts {inner.launcher}, which says {value}", "unset it")


def _mpi(env: Mapping[str, str]) -> Environment | None:
    if SLOT in env:
        return _spawned(env)
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return _mpi_place(env, *(f"OMPI_COMM_WORLD_{name}" for name in names))
    if "MPI_LOCALRANKID" in env and ("PMI_RANK" in env or "PMI_SIZE" in env):
        return _mpi_place(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "PMIX_RANK" not in env:
        return None
    step = _slurm_step(env)
    if step is None:
        raise _wrong(env, "PMIX_RANK", "is set without a number of ranks", "start with mpirun")
    advice = "it comes from srun --mpi=pmix"
    return Environment(
        launcher="mpi",
        rank=_number(env, "PMIX_RANK", advice, below=step.world_size, limit="SLURM_STEP_NUM_TASKS"),
        world_size=step.world_size,
        local_rank=step.local_rank,
        local_world_size=step.local_world_size,
    )


def _mpi_place(
    env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str
) -> Environment:
    advice = "mpirun sets it: start with mpirun, or unset all of its variables"
    world_size = _number(env, size, advice, low=1)
    local_world_size = _number(env, local_size, advice, low=1)
    return Environment(
        launcher="mpi",
        rank=_number(env, rank, advice, below=world_size, limit=size),
        world_size=world_size,
        local_rank=_number(env, local_rank, advice, below=local_world_size, limit=local_size),
        local_world_size=local_world_size,
        replacements=_number(env, REPLACE, "unset it") if REPLACE in env else 0,
    )


def _spawned(env: Mapping[str, str]) -> Environment:
    advice = f"`lockstep train -n N --replace K` sets it: unset {SLOT} and {SIZE}"
    size = _number(env, SIZE, advice, low=1)
    return Environment(
        launcher="mpi",
        rank=_number(env, SLOT, advice, low=size),
        world_size=size,
        local_world_size=size,
        joins=True,
        replacements=_number(env, REPLACE, advice),
    )


def _slurm_step(env: Mapping[str, str]) -> Environment | None:
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    advice = "srun sets it: start with srun, or unset SLURM_STEP_ID to run one process"
    step = _number(env, "SLURM_STEP_ID", advice)
    if step >= _FIRST_SPECIAL_STEP:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    world_size = _number(env, size_name, advice, low=1)
    rank = _number(env, "SLURM_PROCID", advice, below=world_size, limit=size_name)
    node = _number(env, "SLURM_NODEID", advice) if "SLURM_NODEID" in env else 0
    local_rank = _number(env, "SLURM_LOCALID", advice, below=world_size, limit=size_name)
    address, port = (None, None) if world_size == 1 else _slurm_master(env, step)
    return Environment(
        launcher="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=max(_tasks_on_node(env, node, world_size), local_rank + 1),
        master_addr=address,
        master_port=port,
    )


def _slurm_master(env: Mapping[str, str], step: int) -> tuple[str, int]:
    """Host and port at which the ranks of a step meet: the user's choice first."""
    address = env.get("MASTER_ADDR")
    if not address:
        address = first_host(_text(env, "SLURM_STEP_NODELIST", "srun sets it; or set MASTER_ADDR"))
    if env.get("MASTER_PORT"):
        return address, _port(env)
    job = _number(env, "SLURM_JOB_ID", "srun sets it; or set MASTER_PORT")
    return address, _FIRST_PORT + (job * 31 + step) % _NUM_PORTS


def _tasks_on_node(env: Mapping[str, str], node: int, world_size: int) -> int:
    """This node's entry of `SLURM_STEP_TASKS_PER_NODE`, such as `4(x2),3`."""
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE")
    if per_node is None:
        nodelist = env.get("SLURM_STEP_NODELIST")
        return -(-world_size // (1 if nodelist is None else num_hosts(nodelist)))
    try:
        for item in per_node.split(","):
            count, _, repeat = item.partition("(x")
            node -= parse_int(repeat.rstrip(")") or "1", least=1)
            if node < 0:
                return parse_int(count, least=1)
    except ValueError:
        pass
    raise _wrong(env, "SLURM_STEP_TASKS_PER_NODE", "has no entry for this node", "srun sets it")


def _number(
    env: Mapping[str, str],
    name: str,
    advice: str,
    *,
    low: int = 0,
    below: int | None = None,
    limit: str = "",
) -> int:
    """An integer variable; `advice` says what to do if it is not one in [low, below)."""
    text = _text(env, name, advice)
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise _wrong(env, name, "is not a whole number", advice)
    value = int(text)
    if value < low:
        raise _wrong(env, name, f"is less than {low}", advice)
    if below is not None and value >= below:
        raise _wrong(env, name, f"must be less than {limit}={below}", advice)
    return value


def _port(env: Mapping[str, str]) -> int:
    return _number(
        env, "MASTER_PORT", "set a free port of rank 0's host", low=1, below=65_536, limit="ports"
    )


def _text(env: Mapping[str, str], name: str, advice: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise _wrong(env, name, "is not set" if name not in env else "is empty", advice)
    return value


def _wrong(env: Mapping[str, str], name: str, problem: str, advice: str) -> EnvironError:
    which = f"{name}={shown(env[name])[1:-1]}" if name in env else name
    return EnvironError(f"environment variable {which} {problem}; {advice}")


def num_hosts(nodelist: str) -> int:
    """The number of hosts of SLURM's compressed list.

    Raises:
        EnvironError: the list is not well-formed.
    """
    sizes = ([group.size for group in groups] for _, groups in _hosts(nodelist))
    return sum(map(math.prod, sizes))


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list.

    Raises:
        EnvironError: the list is not well-formed.
    """
    texts, groups = _hosts(nodelist)[0]
    pairs = zip(texts, [*(group.first for group in groups), ""], strict=True)
    return "".join(text + number for text, number in pairs)


class _Group(NamedTuple):
    """Numbers in brackets: the first one as it is written, and how many there are."""

    first: str
    size: int


def _hosts(nodelist: str) -> list[tuple[list[str], list[_Group]]]:
    """Entries of a list: the texts before, between and after their groups, and the groups."""
    entries = []
    if _HOSTS.fullmatch(nodelist):
        for host in re.findall(_HOST, nodelist, re.ASCII):
            groups = [_group(text) for text in re.findall(_GROUP, host, re.ASCII)]
            entries.append((re.split(_GROUP, host, flags=re.ASCII), groups))
    if not entries or any(group.size < 1 for _, groups in entries for group in groups):
        raise EnvironError(
            f"node list {shown(nodelist)} is malformed: expected hosts like n1 or n[01-03,07], "
            "separated by commas; set MASTER_ADDR to rank 0's host to do without it"
        )
    return entries


def _group(text: str) -> _Group:
    """`[01-03,07]` as a group; 0 numbers where a range ends before it begins."""
    ranges = [item.partition("-") for item in text[1:-1].split(",")]
    sizes = [int(last or first) - int(first) + 1 for first, _, last in ranges]
    return _Group(ranges[0][0], sum(sizes) if min(sizes) > 0 else 0)
