"""`lockstep sweep`: a run of each config, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import environment, result
from tests.launching.api import longer_tasks
from tests.slurm.cluster import wait_for

from lockstep.observe.reading.listing import summarise

TASK = f"{longer_tasks.__file__}:Line"


@pytest.mark.slow
def test_it_trains_tells_skips_and_goes_on(lockstep: Any, tmp_path: Path) -> None:
    # A learning rate of 1e30 is a config that works, and a training that does not.
    values = ("sweep", TASK, "lr=0.01,0.1,1e+30", "epochs=1", "--dir", "s", "-j", "2")
    dry = lockstep(*values, "--dry-run")
    assert dry.stdout.splitlines() == [f"to train: lr={v} (new)" for v in ("0.01", "0.1", "1e+30")]
    assert not (tmp_path / "s").exists()
    done = lockstep(*values)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exit code 2, see s/lr=1e+30.log: lr=1e+30\n" in done.stdout
    assert "the loss is" in (tmp_path / "s" / "lr=1e+30.log").read_text()
    assert (tmp_path / "s" / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    table = [line.split() for line in done.stdout.splitlines() if "completed" in line]
    assert [float(row[1]) for row in table] == sorted(float(row[1]) for row in table)
    alone = lockstep("train", TASK, "lr=0.1", "epochs=1", "--run-dir", "alone", "-q")
    assert alone.returncode == 0, alone.stderr
    digest = result(tmp_path / "alone")["params_sha256"]
    assert result(tmp_path / "s" / "lr=0.1")["params_sha256"] == digest
    # Longer: those that are there go on, and the one that has failed is left alone.
    longer = lockstep(*values[:3], "epochs=2", *values[4:])
    assert "training: lr=0.1\n" in longer.stdout
    assert "left alone: lr=1e+30 (failed)\n" in longer.stdout
    assert result(tmp_path / "s" / "lr=0.1")["step"] == 12
    assert (
        "training: lr=1e+30\n" in lockstep(*values[:3], "epochs=2", *values[4:], "--retry").stdout
    )


@pytest.mark.slow
def test_ctrl_c_stops_in_order_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "sweep", TASK, "seed=0..2", "--dir", "s"]
    long = [*command, "steps=2000", "log_every=1"]
    process = subprocess.Popen(
        long, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    first = tmp_path / "s" / "seed=0"
    wait_for(lambda: (first / "metrics.csv").exists() and summarise(first).step > 3, 60, "steps")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted; the same command goes on" in out
    assert "training: seed=1" not in out
    assert summarise(first).state == "stopped"
    stopped_at = summarise(first).step
    short = [*command, f"steps={stopped_at + 5}"]
    done = subprocess.run(
        short, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [summarise(tmp_path / "s" / f"seed={n}").state for n in range(3)] == ["completed"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lr=0.1,1e-1",), "lr=1e-1: is the same config as lr=0.1"),
        (("nothing=1,2",), "unknown key 'nothing'"),
        (("lr=1,x",), "lr='x'"),
        (("lr=1,2", "--jobs", "0"), "--jobs 0: must be at least 1"),
        (("lr=1,2", "-n", "0"), "-n 0: must be at least 1"),
        (("lr=1,2", "--submit"), "--submit: needs --slurm"),
        (("lr=1,2", "--", "--qos=a"), "options for sbatch need --slurm"),
    ],
)
def test_what_does_not_work_trains_nothing(
    here: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = here("sweep", TASK, "--dir", "s", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_of_another_sweep_or_of_a_run_is_refused(here: Any, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text('{"target": "digits"}')
    assert "holds a sweep of digits" in here("sweep", TASK, "lr=1,2", "--dir", "s").stderr
    (tmp_path / "s" / "sweep.json").write_text("{")
    assert "cannot be read" in here("sweep", TASK, "lr=1,2", "--dir", "s").stderr
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("{}")
    assert "is the directory of a run" in here("sweep", TASK, "lr=1,2", "--dir", "r").stderr


def test_a_job_array_has_a_point_for_each_task(here: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        'time: "5"\ncpus_per_task: 2\nsbatch: ["--mem=2G"]\nsetup: ./site.sh\n'
    )
    (tmp_path / "site.sh").write_text("#SBATCH --gres=a\n")
    options = ("--dir", "s", "--slurm", "job.yaml", "-j", "3", "--", "--mem=1G")
    done = here("sweep", TASK, "lr=1,2", "how='it,s','$(touch owned)'", *options)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "s" / "sweep.sbatch"
    text = path.read_text()
    assert "#SBATCH --array=0-3%3\n" in text
    assert "#SBATCH --gres=a\n#SBATCH --mem=1G\n" in text
    assert text.count("threads=2) ;;") == 4
    words = "import sys; print(sys.argv[1:])"
    fake = text.replace("@@", "")
    start, _, rest = fake.partition("mpirun")
    assert rest
    env = {"PATH": "/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "1"}
    head = start[: start.index("if [ -n", start.index("esac"))]
    shown = subprocess.run(
        ["bash", "-c", f"{head}\n{sys.executable} -c '{words}' \"${{point[@]}}\""],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == str(["lr=2", "how='$(touch owned)'", "threads=2"])
    assert not (tmp_path / "owned").exists()
    script = here("sweep", str(longer_tasks.__file__), "lr=1,2", "--dir", "t", *options[2:])
    assert "is a script" in script.stderr
    done = here("sweep", TASK, "lr=1,2", "--dir", "u", *options[2:-1], "--array=1-2")
    assert "--array: is set by lockstep sweep" in done.stderr
    (tmp_path / "site.sh").write_text("a=1\n#SBATCH --arra=0-1\n")
    done = here("sweep", TASK, "lr=1,2", "--dir", "u", *options[2:-2])
    assert "site.sh, line 2: --arra: is set by lockstep sweep" in done.stderr
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize(
    ("jobs", "limit"), [((), ""), (("-j", "1"), "%1"), (("--jobs", "2"), "%2")]
)
def test_at_most_so_many_tasks_run_at_a_time(
    here: Any, tmp_path: Path, jobs: tuple[str, ...], limit: str
) -> None:
    (tmp_path / "job.yaml").write_text("time: '5'\n")
    done = here("sweep", TASK, "lr=1,2", "--dir", "s", "--slurm", "job.yaml", *jobs)
    assert done.returncode == 0, done.stderr
    assert f"#SBATCH --array=0-1{limit}\n" in (tmp_path / "s" / "sweep.sbatch").read_text()
