"""Starting scripts on several ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import environment

from lockstep.launching.host.processes import children
from lockstep.launching.job.job import GRACE_S

SCRIPTS = Path(__file__).parent / "launched"
SOURCE = Path(__file__).parents[2] / "src"
_NEVER_STARTED = "The PMIx server's listener thread failed to start"
MPIRUN = Path(sys.executable).parent / "mpirun"


def run(command: list[str], timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with both outputs in one; fail the test if it hangs."""
    variables = {
        "PYTHONPATH": str(SOURCE),
        "PYTHONWARNINGS": "ignore::FutureWarning",  # older names of torch must work, too
        **variables,
    }
    with subprocess.Popen(
        command,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline, idle_s, has_begun = time.monotonic() + timeout_s, 0, False
        while True:
            try:
                output, _ = process.communicate(timeout=1)
                break
            except subprocess.TimeoutExpired:
                # With a rank lost, mpirun may outlive all others for good.
                ranks = children(process.pid)
                has_begun = has_begun or bool(ranks)
                idle_s = idle_s + 1 if has_begun and not ranks else 0
            if idle_s > GRACE_S or time.monotonic() > deadline:
                # mpirun ends its ranks on SIGTERM; on SIGKILL it could not.
                process.terminate()
                output, _ = process.communicate(timeout=20)
                if idle_s <= GRACE_S:
                    pytest.fail(f"{command} did not end within {timeout_s} s:\n{output}")
                break
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.fixture(scope="session")
def run_to_end() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run`, for tests that bring their own MPI."""
    return run


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script of this folder on some ranks; returns the completed process."""
    if not MPIRUN.exists():
        pytest.skip("Open MPI is not installed in this environment")

    def launch(
        script: str,
        num_ranks: int,
        *arguments: str,
        options: tuple[str, ...] = (),
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        command = [str(MPIRUN), "--oversubscribe", "--bind-to", "none"]
        command += ["--mca", "mpi_yield_when_idle", "1", *options, "-n", str(num_ranks)]
        command += [sys.executable, str(SCRIPTS / script), *arguments]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = run(command, timeout_s=150, **root, **variables)
        # Before any rank was started, now and then. `lockstep` starts them again then, too.
        if _NEVER_STARTED in done.stdout:
            done = run(command, timeout_s=150, **root, **variables)
        return done

    return launch
