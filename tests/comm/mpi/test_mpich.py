"""The `mpi4py` backend on MPICH, in an environment of its own (Open MPI owns this one)."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "launched"


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with MPICH, and torch borrowed from this one."""
    home = tmp_path_factory.mktemp("mpich")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    programs = home / "bin"
    install = [str(programs / "pip"), "install", "-q", "mpich", "mpi4py>=4.1,<5"]
    subprocess.run(install, check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # Such a path comes after the environment's own packages, so MPICH is found first.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


@pytest.fixture(scope="module")
def launch(
    mpich: Path, run_to_end: Callable[..., CompletedProcess[str]]
) -> Callable[..., dict[str, object]]:
    def launch_script(script: str, num_ranks: int, *arguments: str) -> dict[str, object]:
        command = [str(mpich / "mpiexec"), "-n", str(num_ranks), str(mpich / "python")]
        done = run_to_end([*command, str(SCRIPTS / script), *arguments], 200)
        assert done.returncode == 0, done.stdout
        return json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "{"))

    return launch_script


@pytest.mark.parametrize(("num_ranks", "ending"), [(1, "destroy"), (2, "leave"), (4, "mixed")])
def test_conformance(launch: Callable[..., dict[str, object]], num_ranks: int, ending: str) -> None:
    summary = launch("conformance.py", num_ranks, "helper", ending)
    assert summary["library"] == "MPICH"
    assert summary["differences"] == []


@pytest.mark.parametrize(
    ("script", "num_ranks"), [("training.py", 2), ("behaviour.py", 2), ("mesh.py", 4)]
)
def test_checks(launch: Callable[..., dict[str, object]], script: str, num_ranks: int) -> None:
    outcome = launch(script, num_ranks)
    assert outcome
    assert {name: errors for name, errors in outcome.items() if errors} == {}
