"""Building: the same bytes again, options that do not fit, and the subcommand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm import cli
from lockstep.systems.hrm.data.build import build, content_digest
from lockstep.systems.hrm.data.format import read_dataset
from lockstep.systems.hrm.data.sources import Options

REQUESTS = {
    "sudoku4": ("sudoku", Options(train=20, test=8)),
    "sudoku6": ("sudoku", Options(size=6, train=5, test=3, augment=4, clues=14)),
    "sudoku9": ("sudoku", Options(size=9, train=3, test=1, augment=4, clues=40)),
    "maze": ("maze", Options(train=4, test=2)),
    "arc": ("arc", Options(train=6, test=5, augment=3)),
    "arc2": ("arc", Options(version=2, train=6, test=5, augment=3, seed=9)),
}
AGAIN = """
import sys
from pathlib import Path
from tests.systems.hrm.data.test_puzzle_build import REQUESTS
from lockstep.systems.hrm.data.build import build
for name, (kind, options) in REQUESTS.items():
    build(kind, Path(sys.argv[1]) / name, options)
assert "torch" not in sys.modules
"""
ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    code = [sys.executable, "-c", AGAIN, str(tmp_path / "theirs")]
    # Sets of texts have another order in each process, unless this is set.
    done = subprocess.run(
        code, cwd=ROOT, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    digests = set()
    for name, (kind, options) in REQUESTS.items():
        built = build(kind, tmp_path / "ours" / name, options)
        digests.add(content_digest(built.folder))
        assert content_digest(built.folder) == content_digest(tmp_path / "theirs" / name), name
        assert read_dataset(built.folder)["test"].metadata.total_groups == (
            built.sizes["test"].num_groups
        )
    assert len(digests) == len(REQUESTS)


@pytest.mark.parametrize("name", ["sudoku4", "maze", "arc"])
def test_another_seed_gives_another_dataset(tmp_path: Path, name: str) -> None:
    kind, options = REQUESTS[name]
    first = build(kind, tmp_path / "first", options)
    second = build(kind, tmp_path / "second", Options(**{**vars(options), "seed": 1}))
    assert content_digest(first.folder) != content_digest(second.folder)


def test_more_puzzles_are_the_same_ones_and_others(tmp_path: Path) -> None:
    few = build("sudoku", tmp_path / "few", Options(train=10, test=3, augment=2))
    many = build("sudoku", tmp_path / "many", Options(train=30, test=5, augment=2))
    for split, count in (("train", 30), ("test", 3)):
        shown = read_dataset(few.folder)[split].sets["all"].inputs
        others = read_dataset(many.folder)[split].sets["all"].inputs
        assert len(shown) == count
        assert (others[:count] == shown).all()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("chess", Options(), "kind 'chess': must be one of sudoku, maze, arc"),
        ("sudoku", Options(version=1), "--version 1: is not for sudoku"),
        ("arc", Options(size=9), "--size 9: is not for arc"),
        ("arc", Options(csv=Path("x.csv")), "--csv x.csv: is not for arc"),
        ("maze", Options(clues=3), "--clues 3: is not for maze"),
        ("sudoku", Options(size=5), "size=5: must be one of 4, 6, 9"),
        ("sudoku", Options(train=0), "--train 0: must be at least 1"),
        ("sudoku", Options(augment=-1), "--augment -1: must be at least 0"),
        ("sudoku", Options(seed=-1), "--seed -1: must be from 0"),
        ("sudoku", Options(seed=2**63), "--seed 9223372036854775808: must be from 0"),
        ("sudoku", Options(csv=Path("x.csv"), clues=3), "--clues 3: is for puzzles that are made"),
        ("arc", Options(version=3), "version=3"),
        ("arc", Options(train=401), "--train 401: there are 400 such tasks"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, kind: str, options: Options, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(kind, tmp_path / "data", options)
    assert not list(tmp_path.iterdir())


def run(*arguments: object) -> str:
    """The subcommand's output, as `lockstep hrm` gives it."""
    app = typer.Typer()
    app.add_typer(cli.app, name="hrm")
    done = CliRunner().invoke(app, ["hrm", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_subcommand_says_what_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    arguments = ("data", "sudoku", folder, "--train", 20, "--test", 8, "--augment", 3)
    lines = [
        f"wrote {folder}",
        "train: 20 groups, 80 puzzles, 80 examples",
        "test: 8 groups, 8 puzzles, 8 examples",
        "16 tokens an example, 6 in the vocabulary, 1 puzzle identifiers",
    ]
    assert run(*arguments).splitlines() == lines
    with pytest.raises(DataError, match="holds another dataset"):
        run(*arguments, "--seed", 1)
    assert run(*arguments, "--seed", 1, "--overwrite").splitlines() == lines


def test_the_subcommand_hands_on_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []

    def no_work(kind: str, folder: Path, options: Options, *, overwrite: bool) -> object:
        asked.append(options)
        raise ConfigError("enough")

    monkeypatch.setattr("lockstep.systems.hrm.data.build.build", no_work)
    with pytest.raises(ConfigError, match="enough"):
        run(
            "data", "maze", tmp_path, "--size", 1, "--train", 2, "--test", 3, "--augment", 4,
            "--seed", 5, "--csv", "6", "--rating", 7, "--clues", 8, "--version", 9,
        )  # fmt: skip
    assert asked == [Options(1, 2, 3, 4, 5, Path("6"), 7, 8, 9)]
