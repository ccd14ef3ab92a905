"""The sdist has everything, and the wheel that is built from it what a user needs."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import lockstep as ls
from tests.conftest import environment, result
from tests.pages import script

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "tests", "examples", "benchmarks", ".ci")
FILES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
    "mkdocs.yml", "pyproject.toml",
)  # fmt: skip
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", ".*_cache")


def leftovers(folder: str, names: list[str]) -> set[str]:
    """What others have left in a folder, among them the runs of examples."""
    runs = set() if Path(folder).is_relative_to(ROOT / "src") else {"runs"} & {*names}
    return LEFTOVERS(folder, names) | runs


def build(kind: str, tree: Path, out: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=tree,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], Path]:
    """What should be in the sdist, what is, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=leftovers)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    expected = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    sdist = build("sdist", tree, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    return expected, held, build("wheel", unpacked, folder / "wheel")


def test_the_sdist_is_complete(built: tuple[set[str], set[str], Path]) -> None:
    expected, held, _ = built
    assert not expected - held
    made = {name for name in held - expected if "egg-info" not in name}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_has_the_package_and_nothing_else(
    built: tuple[set[str], set[str], Path],
) -> None:
    expected, _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name.removeprefix("src/") for name in expected if name.startswith("src/")}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert "lockstep/py.typed" in names
    assert {n for n in names if n.endswith(".cpp")} == {n for n in package if n.endswith(".cpp")}


def test_the_metadata(built: tuple[set[str], set[str], Path]) -> None:
    _, _, wheel = built
    folder = f"lockstep_train-{ls.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        told = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
        names = archive.namelist()
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
    assert told["Version"] == ls.__version__
    assert told["License-Expression"] == "Apache-2.0 AND MIT"
    # The script that draws curves comes along, with its own.
    assert any("/licenses/" in name and "uplot" in name.lower() for name in names)
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert "Apache License" in licence
    assert "lockstep = lockstep.__main__:main" in scripts


@pytest.fixture
def installed(built: tuple[set[str], set[str], Path], tmp_path: Path) -> Path:
    """The `bin` of a new environment with the wheel; what the wheel needs is borrowed from ours."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--force-reinstall", built[2]], check=True, timeout=120)
    where = subprocess.check_output(
        [python, "-c", "import lockstep; print(lockstep.__file__)"], cwd=tmp_path, text=True
    )
    assert Path(where.strip()).is_relative_to(site)
    return folder / "bin"


@pytest.mark.slow
def test_first_steps_work_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    env = environment(cold=True)
    # mpirun is a dependency's command: it is found behind those of the new environment.
    env["PATH"] = os.pathsep.join([str(installed), sysconfig.get_path("scripts"), env["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script("start/tutorial.md")],
        cwd=empty, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    runs = {name: result(empty / "runs" / name) for name in ("one", "two", "parts")}
    assert [run["world_size"] for run in runs.values()] == [1, 2, 1]
    assert len({run["params_sha256"] for run in runs.values()}) == 1


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{ls.__version__}]" in text
    assert text.index("## [Unreleased]") < text.index(f"## [{ls.__version__}]")
