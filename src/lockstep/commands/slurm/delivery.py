"""Writing a job's script, and handing it to SLURM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.files import replacing
from lockstep.launchers.slurm.script import FIRST_COMMENT, BatchJob, script


def deliver(batch: BatchJob, path: Path, submit: bool) -> None:
    """Write a job's script, and hand it to SLURM if asked to.

    Raises:
        LaunchError: it has a text that no script may have, cannot be written, or is refused.
    """
    _write(path, script(batch))
    print(f"wrote {path}", flush=True)
    if submit:
        print(f"submitted job {_submit(path)}", flush=True)


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and FIRST_COMMENT not in path.read_text(errors="replace")[:200]:
            raise LaunchError(
                f"{path}: is there already, and not from lockstep slurm; choose another --output"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise LaunchError(
            f"{path}: cannot be written: {error.strerror or error}; choose another --output"
        ) from error


def _submit(path: Path) -> str:
    """Submit a script: the job's number."""
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
