"""Names of puzzle identifiers: they are part of the data, and must fit the puzzles of ARC."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.systems.hrm.tiny_arc import RUN, TINY

from lockstep.config import override
from lockstep.errors import DataError
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.data.arc import parse_name
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_identifiers
from lockstep.systems.hrm.data.sources import Options
from lockstep.systems.hrm.task import Hrm

FILE = "identifiers.json"
WITHOUT = ("puzzle_ids=false", "steps=1", "eval_every=1", "checkpoint.every=1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three tasks to learn and two to answer; not to be changed."""
    folder = tmp_path_factory.mktemp("names") / "arc"
    build("arc", folder, Options(train=3, test=2, augment=2, version=1))
    return folder


@pytest.fixture
def arc(made: Path, tmp_path: Path) -> Path:
    """A copy of it, which may be changed."""
    return Path(shutil.copytree(made, tmp_path / "arc"))


def task(folder: Path, *more: str) -> Hrm:
    return Hrm(override(HrmConfig(), [*TINY, f"data_dir={folder}", *more]))


def renamed(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / FILE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def rotated(names: list[str]) -> list[str]:
    """A task's augmentations have the names of one another."""
    return [*names[:10], names[11], names[12], names[10], *names[13:]]


def swapped(names: list[str]) -> list[str]:
    """Two tasks have the names of one another."""
    return [*names[:10], *names[13:16], *names[10:13]]


def with_name(number: int, name: str) -> Callable[[list[str]], list[str]]:
    return lambda names: [*names[:number], name, *names[number + 1 :]]


def bare(names: list[str]) -> list[str]:
    return [names[0], *(parse_name(name)[0] for name in names[1:])]


WRONG: list[tuple[Callable[[list[str]], list[str]], str]] = [
    (rotated, r"(inputs|labels) of the test's examples \d+ and \d+ are not one grid"),
    (swapped, r"(inputs|labels) of the test's examples \d+ and \d+ are not one grid"),
    (bare, r"number 2: '\w{8}': is the name of number 1 too"),
    (with_name(12, "foo"), r"group 0 of the test has puzzles of the tasks '\w{8}' and 'foo'"),
    (with_name(12, "<blank>"), r"number 12: '<blank>': is the name of no puzzle"),
    (with_name(12, "x_t9_0123456789"), "identifier 'x_t9_0123456789': names no augmentation"),
    (lambda names: names[:-1], "has 15 names in identifiers.json for 16 puzzle identifiers"),
    (lambda names: [*names, "more"], "has 17 names in identifiers.json for 16"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_names_that_do_not_fit_the_puzzles_are_refused(
    arc: Path, change: Callable[[list[str]], list[str]], said: str
) -> None:
    task(arc).data_digest()
    renamed(arc, change)
    with pytest.raises(DataError, match=said) as caught:
        task(arc).data_digest()
    assert FILE in str(caught.value)
    assert "get the dataset again" in str(caught.value)
    task(arc, "puzzle_ids=false").data_digest()


def test_names_of_tasks_are_only_known_by_their_digest(arc: Path) -> None:
    """Other names of the same augmentations fit the grids; they are another dataset."""
    before, without = (task(arc, *more).data_digest() for more in ((), ("puzzle_ids=false",)))
    renamed(arc, lambda names: [name.replace("_t", "0_t") for name in names])
    with pytest.raises(DataError, match="puzzles of the tasks"):
        task(arc).data_digest()  # the task itself has its old name
    renamed(arc, lambda n: [n[0], *(name if "_" in name else name + "0" for name in n[1:])])
    assert task(arc).data_digest() != before
    assert task(arc, "puzzle_ids=false").data_digest() == without


@pytest.mark.parametrize("array", ["inputs", "labels"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_grid_that_is_not_what_its_name_says_is_refused(
    arc: Path, array: str, place: int
) -> None:
    path = arc / "test" / f"all__{array}.npy"
    tokens = np.load(path, allow_pickle=False)
    (cell,) = np.flatnonzero(tokens[place] >= 2)[:1]
    tokens[place, cell] = 2 + (tokens[place, cell] - 1) % 10
    np.save(path, tokens, allow_pickle=False)
    with pytest.raises(DataError, match=f"{array} of the test's examples"):
        task(arc).data_digest()
    tokens[place, cell] = 1
    tokens[place, -1] = 2  # a colour that is not of the grid in the corner
    np.save(path, tokens, allow_pickle=False)
    with pytest.raises(DataError, match=f"{array} of the test's examples"):
        task(arc).data_digest()


def test_groups_and_identifiers_that_contradict_names_are_refused(arc: Path) -> None:
    path = arc / "test" / "all__puzzle_identifiers.npy"
    identifiers = np.load(path, allow_pickle=False)
    for number, said in (
        (0, "puzzle 4 of the test has identifier 0, '<blank>'"),
        (15, "identifier 15 is that of 2 puzzles of the test"),
    ):
        np.save(path, np.where(identifiers == 14, number, identifiers), allow_pickle=False)
        with pytest.raises(DataError, match=said):
            task(arc).data_digest()
    np.save(path, identifiers, allow_pickle=False)
    path, about = arc / "test" / "all__group_indices.npy", arc / "test" / "dataset.json"
    values = json.loads(about.read_text())
    for groups, said in (
        ([0, 2, 3, 6], r"task '\w{8}' has puzzles in the groups 0 and 1 of the test"),
        ([0, 6], r"group 0 of the test has puzzles of the tasks"),
    ):
        np.save(path, np.array(groups), allow_pickle=False)
        about.write_text(json.dumps({**values, "total_groups": len(groups) - 1}))
        with pytest.raises(DataError, match=said):
            task(arc).data_digest()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "identifiers.json: there is no such file"),
        ('["<blank>", "a', "identifiers.json: .*; must be a list of names"),
        ('{"a": 1}', "identifiers.json: .*; must be a list of names"),
        ("[1, 2]", "identifiers.json: .*; must be a list of names"),
    ],
)
def test_names_that_cannot_be_read_end_training_before_it_begins(
    here: Callable[..., Any], arc: Path, tmp_path: Path, content: str | None, said: str
) -> None:
    if content is None:
        (arc / FILE).unlink()
    else:
        (arc / FILE).write_text(content)
    ended = here("train", "hrm", *RUN, "data_dir=arc", "--run-dir", "run")
    assert ended.returncode == 2
    assert re.search(said, ended.stderr)
    assert "Traceback" not in ended.stdout + ended.stderr
    assert not list(tmp_path.glob("run/checkpoints/step_*"))


def test_names_are_refused_on_all_ranks(
    lockstep: Callable[..., Any], arc: Path, tmp_path: Path
) -> None:
    renamed(arc, rotated)
    ended = lockstep(
        "train", "hrm", "-n", 2, "--launcher", "local", "--run-dir", tmp_path / "run", *RUN,
        f"data_dir={arc}", timeout=100,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "are not one grid once turned back" in ended.stdout + ended.stderr


def test_models_without_identifiers_need_no_names_until_votes_are_counted(
    here: Callable[..., Any], arc: Path
) -> None:
    names = read_identifiers(arc)
    (arc / FILE).unlink()
    ended = here("train", "hrm", *RUN, *WITHOUT, "data_dir=arc", "--run-dir", "run")
    assert ended.returncode == 0, ended.stderr
    for content, said in ((None, "there is no such file"), (rotated(names), "are not one grid")):
        if content is not None:
            (arc / FILE).write_text(json.dumps(content))
        ended = here("hrm", "eval", "run", "--segments", "1")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert said in ended.stderr
    (arc / FILE).write_text(json.dumps(names))
    assert "2 tasks" in here("hrm", "eval", "run", "--segments", "1").stdout


def test_other_names_are_other_data_for_resumes_and_evaluations(
    here: Callable[..., Any], arc: Path
) -> None:
    """As other labels of the test are."""
    keys = (*RUN, "data_dir=arc", "--run-dir", "run")
    assert here("train", "hrm", *keys, "stop_at_step=2").returncode == 0
    labels = arc / "test" / "all__labels.npy"
    before, old_names = labels.read_bytes(), (arc / FILE).read_bytes()
    for name in ("labels", "names"):
        if name == "names":
            renamed(arc, lambda names: [n.replace(names[1][:8], "01234567") for n in names])
        else:
            tokens = np.load(labels, allow_pickle=False)
            np.save(labels, np.where(tokens == 0, 1, tokens), allow_pickle=False)
        resumed = here("resume", "run", "stop_at_step=null")
        assert resumed.returncode == 2, name
        assert "data" in resumed.stderr
        voted = here("hrm", "eval", "run", "--segments", "1")
        assert "puzzles are not those that the run was trained on" in voted.stdout, name
        scored = here("eval", "run", "--split", "val")
        assert "the data are not those that the run was trained on" in scored.stdout, name
        labels.write_bytes(before)
        (arc / FILE).write_bytes(old_names)
    assert "trained on" not in here("hrm", "eval", "run", "--segments", "1").stdout


def test_a_checkpoint_that_there_is_not_names_those_that_there_are(
    here: Callable[..., Any], tmp_path: Path
) -> None:
    keys = (*RUN, *WITHOUT, "steps=12", "eval_every=0", "checkpoint.keep=20")
    assert here("train", "hrm", *keys, "--run-dir", "run").returncode == 0
    for command in (
        ("eval", "run", "--split", "val"),
        ("hrm", "eval", "run"),
        ("hrm", "view", "run"),
    ):
        ended = here(*command, "--checkpoint", "77")
        assert ended.returncode == 2
        assert (
            "checkpoints: holds no checkpoint of step 77; choose one of "
            "5, 6, 7, 8, 9, 10, 11, 12, and 4 earlier ones" in ended.stderr
        )
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
        shutil.rmtree(folder)
    ended = here("hrm", "eval", "run", "--checkpoint", "77")
    assert "holds no checkpoint of step 77; there is none of any step" in ended.stderr


def test_a_folder_below_a_file_is_refused_by_name(here: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "af").write_text("")
    for folder in ("af/x", "af/x/y"):
        ended = here("hrm", "data", "sudoku", folder, "--train", "1", "--test", "1")
        assert ended.returncode == 2
        assert f"{folder}: af is a file; give a folder that can be made" in ended.stderr
