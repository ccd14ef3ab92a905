"""Systems of other packages: found by one line of their `pyproject.toml`, and used as ours are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cli.start.subcommands import recipes
from lockstep.errors import ConfigError
from lockstep.launching import systems

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "line-system"
version = "1.0"

[project.entry-points."lockstep.systems"]
line = "line_system:SYSTEM"

[tool.setuptools]
packages = ["line_system"]
"""

FACE = '''
"""A line, fitted."""

from lockstep.launching.systems import CommandGroup, System

SYSTEM = System(
    "line_system.task:Line",
    "A straight line through points.",
    CommandGroup("line", "What to do with a line.", "line_system.cli"),
)
'''

COMMANDS = '''
"""The subcommands of `lockstep line`."""

import typer

app = typer.Typer()


@app.command()
def slope(run_dir: str) -> None:
    """Print the slope that a run has found."""
    import lockstep

    print(f"slope {lockstep.load(run_dir).model.weight.item():.3f}")


@app.command()
def hello() -> None:
    """Say hello."""
    print("hello")
'''

TASK = '''
"""A line through points."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class LineConfig(ls.TrainConfig):
    """Keys."""

    slope: float = 3.0
    """Of the points."""
    batch_size: int = 16
    epochs: int = 4
    lr: float = 0.1


class Line(ls.Task):
    """A linear model."""

    name = "line"
    Config = LineConfig

    def build_model(self):
        return nn.Linear(1, 1)

    def dataset(self, split):
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, self.config.slope * x)

    def loss(self, model, batch):
        x, y = batch
        return ls.Loss(((model(x) - y) ** 2).sum(), len(x))

    def report(self, model, split, folder, run_dir):
        (folder / "slope.txt").write_text(str(model.weight.item()))
        return [f"the slope of {split} is known"]

    def export(self, state, folder):
        (folder / "line.txt").write_text(str(state["weight"].item()))
        return ["wrote line.txt"]
'''


@pytest.fixture(params=["written", pytest.param("built", marks=pytest.mark.slow)])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package was installed into: by pip, or as pip would write it."""
    folder = tmp_path_factory.mktemp("package")
    package = folder / "source" / "line_system"
    package.mkdir(parents=True)
    for name, text in {"__init__": FACE, "cli": COMMANDS, "task": TASK}.items():
        (package / f"{name}.py").write_text(text)
    if request.param == "written":
        about = package.parent / "line_system-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: line-system\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[lockstep.systems]\nline = line_system:SYSTEM\n")
        return package.parent
    (package.parent / "pyproject.toml").write_text(PROJECT)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    where = folder / "site"
    subprocess.run(
        [*pip, "--no-index", "--target", str(where), str(package.parent)], check=True, timeout=120
    )
    return where


@pytest.mark.slow
def test_a_system_of_another_package_is_trained_reported_and_exported(
    lockstep: Callable[..., subprocess.CompletedProcess[str]], installed: Path, tmp_path: Path
) -> None:
    path = {"PYTHONPATH": str(installed), "cold": True}
    trained = lockstep("train", "line", "-n", "2", "slope=2.0", "--run-dir", "run", **path)
    assert trained.returncode == 0, trained.stderr
    assert "line, 2 parameters" in trained.stdout
    assert lockstep("line", "slope", "run", **path).stdout.startswith("slope 1.8")
    done = lockstep("eval", "run", "--split", "train", "--report", "figures", **path)
    assert "the slope of train is known" in done.stdout, done.stderr
    assert (tmp_path / "figures" / "slope.txt").is_file()
    assert lockstep("export", "run", "out", **path).returncode == 0
    assert (tmp_path / "out" / "line.txt").is_file()


def known(monkeypatch: pytest.MonkeyPatch, name: str, *values: str) -> None:
    """Have packages declare systems of a name beside ours."""
    entries = [systems.EntryPoint(name, value, "lockstep.systems") for value in values]
    ours = systems.entry_points(group="lockstep.systems")
    monkeypatch.setattr(systems, "entry_points", lambda group: [*ours, *entries])
    systems._entry_points.cache_clear()
    systems._system.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    systems._entry_points.cache_clear()
    systems._system.cache_clear()


ODD = systems.System("lockstep.systems.digits.task:Lost", "Has no such class.")
GONE = systems.System("lockstep.systems.lost.task:Lost", "Has no such module.")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["lost_package:SYSTEM"], "cannot be loaded: ModuleNotFoundError: No module named"),
        (["lockstep.errors:ConfigError"], "is a type, not a lockstep.launching.systems.System"),
        ([f"{__name__}:ODD"], "there is no class lockstep.systems.digits.task:Lost"),
        ([f"{__name__}:GONE"], "there is no class lockstep.systems.lost.task:Lost"),
        ([f"{__name__}:ODD", f"{__name__}:GONE"], "several packages have a recipe 'odd'"),
    ],
)
def test_a_system_that_cannot_be_used_is_said_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, values: list[str], said: str
) -> None:
    known(monkeypatch, "odd", *values)
    assert {"digits", "odd"} <= {*systems.recipe_names()}
    assert {group.name for group in systems.command_groups()} >= {"hrm", "quantum"}
    with pytest.raises(ConfigError, match=said):
        systems.load_recipe("odd")


def test_a_broken_package_hides_no_other_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known(monkeypatch, "odd", "lost_package:SYSTEM")
    recipes()
    shown = capsys.readouterr().out
    assert "odd          cannot be used: the entry point odd" in shown
    assert "quantum      A quantum transformer" in shown


def test_a_package_of_the_name_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, "digits", "other_package:SYSTEM")
    with pytest.raises(ConfigError, match=r"several packages have a recipe 'digits': .*uninstall"):
        systems.load_recipe("digits")
