"""`lockstep slurm`: write a job script, and submit it if asked to."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.clusters.slurm_batch import (
    DOCTOR,
    JobFile,
    batch_job,
    config_of,
    resources_of,
    with_options,
    with_threads,
    write_script,
)
from lockstep.engine.checkpoint.origin import items
from lockstep.errors import LaunchError
from lockstep.launching.job.commands import SILENCE_S
from lockstep.launching.slurm.script import FIRST_COMMENT, BatchJob, script
from lockstep.launching.targets import absolute


def deliver(batch: BatchJob, path: Path, submit: bool) -> None:
    """Write a job's script, and submit it to SLURM if asked to.

    Raises:
        LaunchError: it has a text that no script may have, cannot be written, or is refused.
    """
    write_script(path, script(batch), FIRST_COMMENT)
    print(f"wrote {path}", flush=True)
    if submit:
        print(f"submitted job {_submit(path)}", flush=True)


def _submit(path: Path) -> str:
    """Submit a script; returns the number of the job."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            f"there is no sbatch here; install SLURM's client (`apt-get install slurm-client`), or "
            f"run `sbatch {path}` on a machine of the cluster: the script is written"
        )
    done = subprocess.run([sbatch, "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(
            f"sbatch refuses {path}: {done.stderr.strip() or f'exit code {done.returncode}'}; "
            "the script is written"
        )
    return done.stdout.strip().partition(";")[0]


def slurm(
    target: str,
    overrides: Sequence[str],
    job: JobFile,
    run_dir: Path | None,
    output: Path | None,
    submit: bool,
) -> None:
    """Write a job script that trains a target (or runs `doctor`), and submit it if asked to.

    Args:
        target: recipe, file or script to train, or `doctor`.
        overrides: `key=value` items for the config, and options for sbatch.
        job: options of the job.
        run_dir: path of the run directory; named after the job's number if None.
        output: path of the script to write; named after the target if None.
        submit: whether to submit the script to SLURM.

    Raises:
        LockstepError: something given does not work, and nothing was written; or there is no
            sbatch, or it refused the script, which was written.
    """
    options = [item for item in overrides if item.startswith("-")]
    overrides = [*job.overrides, *(item for item in overrides if not item.startswith("-"))]
    is_doctor = target == DOCTOR
    where = target if is_doctor else absolute(target)
    threads, silence_s = 1, SILENCE_S
    if not is_doctor:
        overrides = with_threads(overrides, job.cpus_per_task, run_dir)
        config = config_of(where, overrides, run_dir)
        threads, silence_s = config.threads, config.hang_timeout_s
        # The exact weights of another run that the job starts from, so that later changes of that
        # run do not matter. Patterns are given already: by the overrides, the task or the script.
        weights = items(config.weights_from)
        overrides += [item for item in weights if not item.startswith("weights_from.only=")]
    if is_doctor and overrides:
        raise LaunchError(f"{overrides[0]!r}: the doctor has no config")
    if is_doctor and job.replace:
        raise LaunchError(f"--replace {job.replace}: the doctor replaces no ranks")
    cpus = threads if job.cpus_per_task is None else job.cpus_per_task
    resources = resources_of(job, cpus, threads)
    name = where.rpartition(":")[2] if ".py:" in where else Path(where).stem
    name = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    path = (output or Path(f"{name}.sbatch")).absolute()
    batch = batch_job(
        name, where, overrides, threads, resources, job.replace, run_dir, path, silence_s
    )
    deliver(with_options(batch, job, options), path, submit)
