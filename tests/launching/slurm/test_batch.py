"""The text of job scripts, and what bash makes of it; no SLURM is needed."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import LaunchError
from lockstep.launching.slurm import Resources, seconds
from lockstep.launching.slurm.script import RUN_DIR, BatchJob, script

pytestmark = pytest.mark.no_ranks

NASTY = "a 'b' \"$(touch owned)\" `touch owned` $HOME; \\"

STRICT = "set -euo pipefail -o noclobber\nIFS=$'\\n\\t'\ntrap 'exit 9' ERR"
"""Lines of a site whose commands must not fail."""


def job(folder: Path, *command: str, run_dir: Path | None = None, **env: str) -> BatchJob:
    return BatchJob(
        "digits", Resources(1, 1, 1, "10"), command, env, 1, run_dir, folder, folder / "%j.log"
    )


def bash(job: BatchJob, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script the way SLURM's batch step does, where there is no scontrol."""
    path = job.work_dir / "job"
    path.write_text(script(job))
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("SLURM")}
    done = subprocess.run(
        ["bash", str(path)], cwd=job.work_dir, env=inherited | {"PATH": "/usr/bin:/bin"} | env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.stdout.startswith("log: "):  # a task of an array writes beside its run directory
        log = Path(done.stdout.splitlines()[0].removeprefix("log: "))
        done.stdout += log.read_text()
    return done


def scontrol(folder: Path) -> str:
    """A PATH with an scontrol that only notes what it is asked for."""
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def ending(folder: Path, reason: str, code: int, then: str = "") -> str:
    """A shell command in place of ranks: it writes a result and exits."""
    status = "completed" if code == 0 else "stopped"
    lines = f'  "status": "{status}",', f'  "reason": "{reason}",', f'  "exit_code": {code}'
    result = f"printf '%s\\n' {' '.join(map(repr, lines))} > {folder}/result.json"
    return f"{then}mkdir -p {folder}; {result}; exit {code}"


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("1-12", 129_600), ("2-0:30", 174_600),
     ("1-00:00:01", 86_401), ("00:00:05", 5)],
)  # fmt: skip
def test_times(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize("time", ["", "0", "00:00:00", "1h", "-5", "1:2:3:4", "1-", "٣", "5\n"])
def test_no_times(time: str) -> None:
    with pytest.raises(LaunchError, match="is no time limit"):
        seconds(time)


def test_all_that_is_asked_for_is_in_the_directives(tmp_path: Path) -> None:
    asked = Resources(3, 4, 2, "1-12", "gpu", "physics", 300)
    lines = script(replace(job(tmp_path, "true"), resources=asked)).splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in (
        "--nodes=3", "--ntasks-per-node=4", "--cpus-per-task=2", "--time=1-12", "--partition=gpu",
        "--account=physics", "--requeue", "--signal=B:USR1@300", "--open-mode=append",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in lines


def test_words_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    session = json.dumps({"run_dir": RUN_DIR, "overrides": [NASTY]})
    code = "import os, sys; print(sys.argv[1:], os.environ['SESSION'])"
    words = ("python3", "-c", code, RUN_DIR, NASTY)
    folder = tmp_path / NASTY.replace("/", "")
    done = bash(
        job(tmp_path, *words, run_dir=folder, SESSION=session),
        SLURM_ARRAY_TASK_ID="7", SLURM_ARRAY_JOB_ID="5", SLURM_JOB_ID="9",
    )  # fmt: skip
    expected = json.dumps({"run_dir": f"{folder}/task-7", "overrides": [NASTY]})
    assert f"{[f'{folder}/task-7', NASTY]} {expected}" in done.stdout
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("env", "name"),
    [({}, "digits-local"), ({"SLURM_JOB_ID": "9"}, "digits-9"),
     ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "7"}, "digits-5_7")],
)  # fmt: skip
def test_each_job_and_task_has_a_run_directory(
    tmp_path: Path, env: dict[str, str], name: str
) -> None:
    done = bash(job(tmp_path, "echo", "got", RUN_DIR), **env)
    assert f"got {tmp_path}/runs/{name}\n" in done.stdout


def test_the_exit_code_is_that_of_the_result(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = bash(job(tmp_path, "bash", "-c", ending(run, "interrupted", 130), run_dir=run))
    assert done.returncode == 130
    assert "ended: stopped, exit code 130" in done.stdout
    assert bash(job(tmp_path, "bash", "-c", "exit 3", run_dir=run)).returncode == 3
    completed = job(tmp_path, "bash", "-c", ending(run, "all steps done", 0), run_dir=run)
    assert bash(completed).returncode == 0


def test_ranks_that_leave_no_result_have_failed(tmp_path: Path) -> None:
    done = bash(job(tmp_path, "true"))
    assert done.returncode == 1
    assert "ended: no result, exit code 1" in done.stdout


def test_a_preempted_run_is_requeued(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = job(tmp_path, "bash", "-c", ending(run, "preempted", 143), run_dir=run)
    done = bash(ranks, SLURM_JOB_ID="9", PATH=scontrol(tmp_path))
    assert done.returncode == 143
    assert (tmp_path / "asked").read_text() == "requeue 9\n"


def test_lines_of_a_site_that_fail_end_the_job(tmp_path: Path) -> None:
    done = bash(replace(job(tmp_path, "echo", "trained"), setup=f"{STRICT}\nfalse"))
    assert (done.returncode, done.stdout) == (9, "")


def test_without_scontrol_the_script_says_what_to_do(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = job(tmp_path, "bash", "-c", ending(run, "preempted", 143), run_dir=run)
    done = bash(ranks, SLURM_JOB_ID="9", PATH=str(bin_without(tmp_path)))
    assert done.returncode == 143
    assert "'scontrol requeue 9'" in done.stdout
    assert f"'lockstep resume {run}'" in done.stdout


@pytest.mark.parametrize("setup", ["", STRICT])
def test_a_notice_reaches_the_ranks(tmp_path: Path, setup: str) -> None:
    run = tmp_path / "run"
    wait = "trap 'got=1' USR1; kill -USR1 $PPID; while [ -z \"$got\" ]; do sleep 0.1; done; "
    ranks = job(tmp_path, "bash", "-c", ending(run, "preempted", 143, wait), run_dir=run)
    done = bash(replace(ranks, setup=setup), SLURM_JOB_ID="9", PATH=scontrol(tmp_path))
    assert "notice of the end" in done.stdout
    assert (tmp_path / "asked").read_text() == "requeue 9\n"


def test_ranks_that_do_not_stop_in_time_are_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = f"mkdir -p {run}/checkpoints/step_00000005; trap '' USR1; kill -USR1 $PPID; "
    code += "while :; do sleep 0.1; done; "
    asked = Resources(1, 1, 1, "10", signal_before_s=2)
    ranks = replace(job(tmp_path, "bash", "-c", code, run_dir=run), resources=asked)
    done = bash(ranks, SLURM_JOB_ID="9", PATH=scontrol(tmp_path))
    assert done.returncode == 143
    assert "did not stop in time" in done.stdout
    assert (tmp_path / "asked").read_text() == "requeue 9\n"


@pytest.mark.parametrize("setup", ["", STRICT])
def test_a_start_that_is_too_slow_is_requeued_once(tmp_path: Path, setup: str) -> None:
    """A job that is asked to stop before each first checkpoint would be requeued for ever."""
    run = tmp_path / "run"
    steps = f"[ -e {tmp_path}/fast ] && mkdir -p {run}/checkpoints/step_00000005; "
    code = f"{steps}trap 'exit 138' USR1; kill -USR1 $PPID; while :; do sleep 0.1; done"
    ranks = replace(job(tmp_path, "bash", "-c", code, run_dir=run), setup=setup)

    def requeued() -> bool:
        (tmp_path / "asked").unlink(missing_ok=True)
        done = bash(ranks, SLURM_JOB_ID="9", PATH=scontrol(tmp_path))
        assert done.returncode == 138
        asked = (tmp_path / "asked").exists()
        assert asked or "not requeued; give it more time" in done.stdout
        return asked

    assert [requeued(), requeued(), requeued()] == [True, False, False]
    (tmp_path / "fast").touch()
    assert [requeued(), requeued(), requeued()] == [True, True, False]


@pytest.mark.parametrize("setup", ["", STRICT])
def test_a_cancelled_run_is_not_requeued(tmp_path: Path, setup: str) -> None:
    run = tmp_path / "run"
    wait = "trap 'got=1' USR2; kill -TERM $PPID; while [ -z \"$got\" ]; do sleep 0.1; done; "
    ranks = job(tmp_path, "bash", "-c", ending(run, "interrupted", 130, wait), run_dir=run)
    done = bash(replace(ranks, setup=setup), SLURM_JOB_ID="9", PATH=scontrol(tmp_path))
    assert done.returncode == 130
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("code", "progress", "requeued"), [(1, True, True), (1, False, False), (2, True, False)]
)
def test_a_lost_rank_is_worth_a_requeue_after_progress(
    tmp_path: Path, code: int, progress: bool, requeued: bool
) -> None:
    run = tmp_path / "run"
    steps = f"mkdir -p {run}/checkpoints/step_00000005; " if progress else ""
    ranks = job(tmp_path, "bash", "-c", f"{steps}exit {code}", run_dir=run)
    assert bash(ranks, SLURM_JOB_ID="9", PATH=scontrol(tmp_path)).returncode == code
    assert (tmp_path / "asked").exists() == requeued


def test_ranks_that_mpirun_has_stopped_since_it_missed_a_node_are_requeued(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = f"mkdir -p {run}/checkpoints/step_00000005; "
    ranks = job(tmp_path, "bash", "-c", ending(run, "terminated", 143, steps), run_dir=run)
    assert bash(ranks, SLURM_JOB_ID="9", PATH=scontrol(tmp_path)).returncode == 143
    assert (tmp_path / "asked").exists()


def bin_without(folder: Path) -> Path:
    """A folder with the programs a script needs, and no scontrol."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("bash", "date", "hostname", "ls", "grep", "sort", "tail", "sed", "rm", "sleep",
                 "mkdir", "cat"):  # fmt: skip
        (programs / name).symlink_to(
            next(p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists())
        )
    return programs


def test_the_log_says_what_runs_where(tmp_path: Path) -> None:
    titled = replace(job(tmp_path, "true"), title="digits 'lr=0.1' seed=2")
    found = bash(titled, SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]", MASTER_PORT="29501")
    for line in (
        "on 2 node(s): n[1-2]",
        "1 rank(s), 1 a node with 1 CPU(s) each, 1 thread(s) each; run directory: ",
        "what: digits 'lr=0.1' seed=2",
        "master address and port: none 29501",
    ):
        assert line in found.stdout


def test_a_job_that_does_not_train_ends_as_its_command(tmp_path: Path) -> None:
    plain = replace(job(tmp_path, "sh", "-c", "echo done; exit 3"), trains=False)
    found = bash(plain)
    assert (found.returncode, found.stdout.splitlines()[-1]) == (3, "done")
    assert "--signal" not in script(plain)
    assert "#SBATCH --no-requeue" in script(plain)
