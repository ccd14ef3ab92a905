from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.launching.host.processes import THREAD_VARIABLES, thread_warnings, usable_cores
from lockstep.launching.rank.environment import Environment
from lockstep.launching.rank.process import num_threads

pytestmark = pytest.mark.no_ranks

HERE = len(os.sched_getaffinity(0))


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Which cores each process may run on; this one is 0."""
    cores = {0: set(range(16))}

    def sched_getaffinity(pid: int) -> set[int]:
        if pid not in cores:
            raise ProcessLookupError(pid)
        return cores[pid]

    monkeypatch.setattr(os, "sched_getaffinity", sched_getaffinity)
    return cores


def machine(root: Path, groups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_counts_cores_this_process_may_run_on(
    tmp_path: Path, affinity: dict[int, set[int]]
) -> None:
    affinity[0] = {3, 4, 5}
    assert usable_cores({}, root=tmp_path) == 3


def test_ranks_bound_to_cores_of_their_own_count_together(
    tmp_path: Path, affinity: dict[int, set[int]]
) -> None:
    affinity |= {0: {0}, 11: {1}, 12: {1, 2}}
    assert usable_cores({}, pids=[11, 12, 99], root=tmp_path) == 3


V2 = {"a/cpu.max": "max 100000", "a/b/cpu.max": "250000 100000"}
V1 = {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        pytest.param("0::/a/b\n", V2, 2, id="v2"),
        pytest.param("0::/a/b/c\n", V2, 2, id="v2, quota of an ancestor"),
        pytest.param("0::/a\n", V2, 16, id="v2, no quota"),
        pytest.param("0::/\n", {"cpu.max": "400000 100000"}, 4, id="v2, in a container"),
        pytest.param("0::/a\n", {"a/cpu.max": "50000 100000"}, 1, id="half a core"),
        pytest.param("4:cpu,cpuacct:/\n", V1, 3, id="v1"),
        pytest.param("4:cpu,cpuacct:/docker/x\n", V1, 3, id="v1, the host's path"),
        pytest.param("5:cpuset:/\n4:memory:/\n", V1, 16, id="v1, other controllers"),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            16,
            id="v1, no quota",
        ),
        pytest.param("0::/a\n", {"a/cpu.max": "100000 0"}, 16, id="v2, garbage"),
        pytest.param("garbage\n\n1:2\n", {"cpu.max": "x"}, 16, id="garbage"),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "0"},
            16,
            id="v1, garbage",
        ),
    ],
)
def test_heeds_the_quota(
    tmp_path: Path, affinity: dict[int, set[int]], groups: str, files: dict[str, str], cores: int
) -> None:
    assert usable_cores({}, root=machine(tmp_path, groups, **files)) == cores


@pytest.mark.parametrize(
    ("env", "ranks", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "3"}, 1, 3),
        ({"SLURM_CPUS_PER_TASK": "3"}, 4, 12),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "6"}, 1, 6),
        ({"SLURM_CPUS_PER_TASK": "64"}, 1, 16),
        ({"SLURM_CPUS_PER_TASK": ""}, 1, 16),
        ({"SLURM_CPUS_ON_NODE": "9" * 5000}, 1, 16),
    ],
)
def test_heeds_slurm(
    tmp_path: Path, affinity: dict[int, set[int]], env: dict[str, str], ranks: int, cores: int
) -> None:
    assert usable_cores(env, ranks, root=tmp_path) == cores


def test_works_on_this_machine() -> None:
    assert 1 <= usable_cores({}) <= HERE


@pytest.mark.parametrize(
    ("threads", "ranks", "cores", "message"),
    [
        (1, 4, 4, None),
        (2, 2, 4, None),
        (1, 5, 4, "5 ranks x 1 thread on 4 cores: oversubscribed.*; 4 ranks would fit"),
        (3, 2, 4, "2 ranks x 3 threads on 4 cores: oversubscribed.*; 1 rank would fit"),
        (8, 1, 4, "1 rank x 8 threads on 4 cores: oversubscribed.*; threads=4 would fit"),
        (1, 2, 8, "2 ranks x 1 thread on 8 cores: 6 cores idle; use more ranks, or threads=4 "),
        (1, 3, 4, "3 ranks x 1 thread on 4 cores: 1 core idle; use more ranks$"),
    ],
)
def test_warns(threads: int, ranks: int, cores: int, message: str | None) -> None:
    if message is None:
        assert thread_warnings(threads, ranks, cores) == []
    else:
        (warning,) = thread_warnings(threads, ranks, cores)
        assert re.search(message, warning), warning


def test_computes_with_so_many_threads_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv(THREAD_VARIABLES[-1])
    before = torch.get_num_threads()
    with num_threads(HERE + 1, Environment()) as warnings:
        assert torch.get_num_threads() == HERE + 1
        assert {os.environ[name] for name in THREAD_VARIABLES} == {str(HERE + 1)}
        assert "oversubscribed" in warnings[0]
    assert torch.get_num_threads() == before
    assert [os.environ.get(name) for name in THREAD_VARIABLES] == ["7", "7", "7", None]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "is_set"), [(2, True), (1, False)])
def test_sets_interop_threads_in_a_rank_only(world_size: int, is_set: bool) -> None:
    code = (
        "import torch; from lockstep.launching.rank.process import num_threads;"
        "from lockstep.launching.rank.environment import Environment\n"
        f"place = Environment(world_size={world_size})\n"
        "before = torch.get_num_interop_threads()\n"
        "with num_threads(1, place), num_threads(2, place):\n"
        "    print(torch.get_num_threads(), torch.get_num_interop_threads(), before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, interop, before = done.stdout.split()
    assert (threads, interop) == ("2", "1" if is_set else before)
