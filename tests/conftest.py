"""Starting real ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.launch.cores import usable_cores
from lockstep.launch.ranks import local_command, mpirun_command, rank_environment, torchrun_command

TASKS = Path(__file__).parent / "distributed" / "tasks.py"


def run(argv, cwd, timeout=240, **env):
    """Run a command; its exit code and output."""
    clean = rank_environment(1)
    clean.pop("LOCKSTEP_SITTING", None)
    return subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env={**clean, "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def lockstep(tmp_path):
    """Runs the `lockstep` command in an empty folder."""

    def call(*arguments, **options):
        return run([sys.executable, "-m", "lockstep", *arguments], tmp_path, **options)

    return call


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Runs the `lockstep` command in this process, in an empty folder."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        monkeypatch.delenv("LOCKSTEP_SITTING", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, out, err)

    return call


@pytest.fixture
def ranks(tmp_path):
    """Runs a script on some ranks under a launcher."""

    def call(launcher, num_ranks, script, *arguments, **options):
        argv = [sys.executable, str(script), *map(str, arguments)]
        if launcher == "mpi":
            argv = mpirun_command(num_ranks, argv, cores=usable_cores()).argv
        elif launcher == "local":
            argv = local_command(num_ranks, argv).argv
        elif launcher == "torchrun":
            argv = torchrun_command(num_ranks, argv).argv
        return run(argv, tmp_path, **options)

    return call


def result(run_dir):
    """A run's result.json."""
    return json.loads((Path(run_dir) / "result.json").read_text())


def target(name="Everything"):
    """A target of the tests' own tasks."""
    return f"{TASKS}:{name}"
