"""What is imported when: nothing slow before it is needed, no recipe but the one asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lockstep as ls

SLOW = {"torch", "numpy", "pydantic", "yaml", "mpi4py", "safetensors"}
SCIENCE = tuple(f"lockstep.systems.{name}." for name in ("ufs", "quantum", "sketched", "hrm"))
"""Beginnings of the names of all modules of systems, apart from the ones that list them."""
COMMAND = """
import sys
sys.argv = ["lockstep", *sys.argv[1:]]
from lockstep.__main__ import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""


def imported(folder: Path, code: str, *arguments: str) -> set[str]:
    """The modules that a fresh interpreter has after running some code."""
    code += "\nimport sys\nsys.stdout.flush()\nprint('modules', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_library_is_imported_name_by_name(tmp_path: Path) -> None:
    assert not imported(tmp_path, "import lockstep") & SLOW
    assert not imported(tmp_path, "import lockstep as ls; ls.LockstepError") & SLOW
    modules = imported(tmp_path, "import lockstep as ls; ls.Task, ls.Loss, ls.TrainConfig")
    assert "torch" in modules
    assert not modules & {
        "lockstep.launching.api",
        "lockstep.engine.run.loop",
        "rich",
        "typer",
        "mpi4py",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--help"], ["--version"], ["recipes"], ["train", "-h"], ["doctor", "--help"],
        ["quantum"], ["quantum", "predict", "-h"], ["data", "ufs-synthetic", "-h"],
        ["sketch", "-h"],
    ],
)  # fmt: skip
def test_asking_for_help_imports_nothing_slow(tmp_path: Path, arguments: list[str]) -> None:
    modules = imported(tmp_path, COMMAND, *arguments)
    assert "lockstep.cli.main" in modules
    assert not modules & {
        "torch",
        "numpy",
        "mpi4py",
        "safetensors",
    }


@pytest.mark.parametrize("arguments", [["runs"], ["diagnose", "run"], ["monitor", "--once"]])
def test_looking_at_runs_does_not_import_torch(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(
        '{"task": "digits", "config_hash": "0123456789abcdef", "target": "digits"}'
    )
    assert not imported(tmp_path, COMMAND, *arguments) & {"torch", "numpy"}


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["train", "-h"]])
def test_commands_of_recipes_are_imported_when_asked_for(
    tmp_path: Path, arguments: list[str]
) -> None:
    modules = imported(tmp_path, COMMAND, *arguments)
    assert not [name for name in modules if name.startswith(SCIENCE)]


def test_a_rank_imports_the_recipe_it_trains_only(tmp_path: Path) -> None:
    modules = imported(tmp_path, COMMAND, "train", "digits", "steps=1", "--run-dir", "r")
    assert "lockstep.systems.digits.task" in modules
    others = (*SCIENCE, "qiskit")
    assert not [name for name in modules if name.startswith(others)]
    commands = (
        "prove.verify", "prove.chaos", "clusters.slurm", "clusters.doctor", "start.evaluate",
        "start.sweep",
    )  # fmt: skip
    unasked = tuple(f"lockstep.cli.{command}" for command in commands)
    assert not [name for name in modules if name.startswith(unasked)]


def test_every_public_name_is_there() -> None:
    assert set(ls.__all__) <= set(dir(ls))
    doors = {"quantum": "systems.quantum", "sketch": "systems.sketched"}
    for name in ls.__all__:
        assert getattr(ls, name).__name__ in (name, f"lockstep.{doors.get(name, name)}")
        assert vars(ls)[name] is getattr(ls, name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'Taks'"):
        ls.Taks  # noqa: B018
