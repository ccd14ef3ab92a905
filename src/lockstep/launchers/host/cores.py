"""How many cores the ranks of this host may use, and whether their number fits."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.cgroups import control_groups

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Environment variables that tell numerical libraries how many threads to start."""

_DIGITS = 10
"""A number with more digits is taken for no number of cores."""


def thread_warnings(threads: int, ranks: int, cores: int) -> list[str]:
    """Warnings about `ranks` × `threads` on one host with `cores`, if they do not match."""
    wanted = ranks * threads
    load = f"{_count(ranks, 'rank')} x {_count(threads, 'thread')} on {_count(cores, 'core')}"
    if wanted > cores:
        fitting = cores // threads
        advice = f"{_count(fitting, 'rank')} would fit" if fitting else f"threads={cores} would fit"
        return [f"{load}: oversubscribed, steps will be slow; {advice}"]
    if wanted < cores:
        advice = "use more ranks"
        if cores // ranks > threads:
            advice += f", or threads={cores // ranks} (bits depend on threads)"
        return [f"{load}: {_count(cores - wanted, 'core')} idle; {advice}"]
    return []


def usable_cores(
    env: Mapping[str, str] | None = None,
    local_ranks: int = 1,
    pids: Iterable[int] = (),
    root: Path = Path("/"),
) -> int:
    """Cores that the ranks on this host may use.

    The least of: the cores that this process or any of `pids` may run on, the control group's
    quota, and what SLURM gives (`SLURM_CPUS_ON_NODE`, or `SLURM_CPUS_PER_TASK` for each rank).

    Args:
        env: environment variables; `os.environ` by default.
        local_ranks: number of ranks on this host.
        pids: process ids of the ranks on this host, where known.
        root: folder in which the file systems `/proc` and `/sys` are.
    """
    env = os.environ if env is None else env
    limits = [_affinity(pids), _quota(root)]
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    on_node = env.get("SLURM_CPUS_ON_NODE", "")
    if on_node.isdecimal() and len(on_node) < _DIGITS:
        limits.append(int(on_node))
    elif per_task.isdecimal() and len(per_task) < _DIGITS:
        limits.append(int(per_task) * local_ranks)
    return max(1, math.floor(min(limits)))


def _affinity(pids: Iterable[int]) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set(os.sched_getaffinity(0))
    for pid in pids:
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return len(cores)


def _quota(root: Path) -> float:
    """CPU seconds a second that the control groups of this process grant (v2, then v1)."""
    limits = [math.inf]
    for is_v2, folder in control_groups("cpu", root):
        limits.append(_quota_v2(folder) if is_v2 else _quota_v1(folder))
    return min(limits)


def _quota_v2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ArithmeticError):  # absent, "max", or no quota
        return math.inf


def _quota_v1(folder: Path) -> float:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else math.inf
    except (OSError, ValueError, ArithmeticError):
        return math.inf


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
