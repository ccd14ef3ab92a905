"""`lockstep hrm solve`, `view` and `eval`, as they are typed, and the files that they write."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import slow

from lockstep.systems.hrm.data.sudoku import Solver
from lockstep.systems.hrm.data.sudoku_board import board_of
from lockstep.systems.hrm.reports.scores import by_segments
from lockstep.systems.hrm.reports.trained_model import Answers, TrainedModel, load_trained

Here = Callable[..., Any]
CLUES = "1... .... .... ...4"


@pytest.fixture
def solving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model answers with a solution from the second segment on, and halts after the first."""
    answers_of = TrainedModel.answers

    def answers(self: TrainedModel, inputs: Any, segments: int, identifiers: Any) -> Answers:
        found = answers_of(self, inputs, segments, identifiers)
        solution = Solver(board_of(4)).solve((inputs[0] - 1).astype(np.uint8))
        assert solution is not None
        found.tokens[1:] = solution + 1
        return replace(found, wants=np.ones_like(found.wants))

    monkeypatch.setattr(TrainedModel, "answers", answers)


def test_a_solution_ends_with_0(here: Here, sudokus: Path, solving: None) -> None:
    done = here("hrm", "solve", str(sudokus), CLUES, "--segments", "3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "+ filled in, * changed since the segment before, ! mistake"
    assert lines[-1] == "solved; would have halted after 1 segment"
    assert "\x1b" not in done.stdout
    assert [line.split(":")[0] for line in lines if line.startswith("segment")] == [
        "segment 1", "segment 2", "segment 3",
    ]  # fmt: skip
    assert "segment 3: halting" in lines[-2]
    assert lines[-2].endswith("0 cells changed, 0 mistakes")


def test_the_solution_is_printed_with_its_clues_unmarked(
    here: Here, sudokus: Path, solving: None
) -> None:
    lines = here("hrm", "solve", str(sudokus), CLUES, "--segments", "2").stdout.splitlines()
    rows = [line[2:] for line in lines[-6:-1] if line]
    digits = "".join(re.findall(r"\d", "".join(rows)))
    clues = np.array([1, *[0] * 14, 4], np.uint8)
    solution = Solver(board_of(4)).solve(clues)
    assert solution is not None
    assert digits == "".join(map(str, solution))
    assert rows[0][1] == "1"
    assert rows[0][0] in " *"  # a clue that the first segment had wrong has changed
    assert set("".join(rows)) <= set(" +*1234")


def test_no_solution_ends_with_1(here: Here, sudokus: Path) -> None:
    done = here("hrm", "solve", str(sudokus), "val:1", "--checkpoint", "3")
    assert done.returncode == 1
    assert re.search(r"\nnot solved: \d+ mistakes; would not have halted within 4 segments\n$",
                     done.stdout)  # fmt: skip
    assert re.search(r"\nsegment 1: halting 0\.\d{3}, \d+ cells? changed, \d+ mistakes?\n",
                     done.stdout)  # fmt: skip
    assert "!" in done.stdout


def test_early_ends_where_the_puzzle_halts(here: Here, sudokus: Path, solving: None) -> None:
    done = here("hrm", "solve", str(sudokus), CLUES, "--early")
    assert "segment 2" not in done.stdout
    assert done.returncode == 1
    assert "would have halted after 1 segment" in done.stdout
    assert "segment 4" in here("hrm", "solve", str(sudokus), CLUES, "--no-early").stdout


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_colours_only_where_they_are_wanted(
    here: Here, sudokus: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = here("hrm", "solve", str(sudokus), "val:2").stdout
    assert "\x1b[1;31m" in coloured  # bold red: a mistake
    assert not re.search(r"[+*!]\d", coloured)
    monkeypatch.setenv(variable, "dumb")
    plain = here("hrm", "solve", str(sudokus), "val:2").stdout
    assert "\x1b" not in plain
    assert re.search(r"[+*!]\d", plain)


def test_a_maze_from_a_file(here: Here, mazes: Path, tmp_path: Path) -> None:
    question = load_trained(mazes, "latest").puzzles("val")[0][1]
    text = "".join("?# SGo"[token] for token in question)
    lines = "\n".join(text[start : start + 30] for start in range(0, 900, 30))
    (tmp_path / "maze.txt").write_text(lines)
    from_file = here("hrm", "solve", str(mazes), "maze.txt")
    assert from_file.returncode == 1
    assert from_file.stdout == here("hrm", "solve", str(mazes), "val:2").stdout
    rows = [line for line in from_file.stdout.splitlines() if line.startswith("  ")]
    assert {len(row) for row in rows} == {62}


def test_bad_puzzles_are_one_message(here: Here, sudokus: Path) -> None:
    for puzzle, message in {
        "1": "puzzle: has 1 cells; this run's Sudokus have 16 (4x4)",
        "11" + 14 * ".": "puzzle: clues contradict one another",
        "9" + 15 * ".": "puzzle: cell 1 is '9'",
        "val:13": "puzzle 'val:13': '13' is more than 12; there are val:1 to val:12",
        "nowhere.txt": "puzzle 'nowhere.txt': is neither a file",
    }.items():
        refused(here("hrm", "solve", str(sudokus), puzzle), message)


@pytest.mark.parametrize(
    ("command", "more"), [("solve", ("val:1",)), slow("view", ()), ("eval", ())]
)
def test_bad_runs_are_one_message(
    here: Here, sudokus: Path, tmp_path: Path, command: str, more: tuple[str, ...]
) -> None:
    refused(here("hrm", command, "nowhere", *more), "nowhere: is no run directory")
    refused(
        here("hrm", command, str(sudokus), *more, "--checkpoint", "newest"),
        "must be best, latest, or a step's number",
    )
    refused(
        here("hrm", command, str(sudokus), *more, "--checkpoint", "7"),
        "no checkpoint of step 7; choose one of 3",
    )
    refused(here("hrm", command, str(sudokus), *more, "--segments", "65"), "--segments 65: ")
    refused(here("hrm", command, str(sudokus), *more, "--segments", "0"), "--segments 0: ")
    for name in ("run.json", "config.yaml"):
        (tmp_path / name).write_bytes((sudokus / name).read_bytes())
    refused(here("hrm", command, ".", *more), "holds no valid checkpoint")
    identity = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(identity.replace('"hrm"', '"digits"'))
    refused(here("hrm", command, ".", *more), ".: is a run of digits, not of hrm")


def refused(done: Any, message: str) -> None:
    """One line on standard error, and exit code 2."""
    assert done.returncode == 2, done
    assert message in done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr


def test_a_table_by_number_of_segments(here: Here, sudokus: Path) -> None:
    done = here("hrm", "eval", str(sudokus), "--segments", "4,1,4", "--early", "--subset", "7")
    assert done.returncode == 0, done.stderr
    first, head, *rows = done.stdout.splitlines()
    assert first == "7 puzzles of val, checkpoint of step 3"
    assert head.split() == ["segments", "exact", "accuracy", "mean", "segments"]
    run = load_trained(sudokus, "latest")
    inputs, labels = run.puzzles("val")
    for row, score in zip(
        rows, by_segments(run, inputs[:7], labels[:7], [1, 4], True), strict=True
    ):
        expected = [str(score.most), f"{score.exact:.4f}", f"{score.accuracy:.4f}"]
        assert row.split() == [*expected, f"{score.segments:.2f}"]
    whole = here("hrm", "eval", str(sudokus)).stdout.splitlines()
    assert whole[0].startswith("12 puzzles")
    assert [line.split()[0] for line in whole[2:]] == ["1", "2", "4", "8", "16", "32", "64"]


@pytest.mark.parametrize("numbers", ["", "1,", "a", "1.5", "-1", "1;2", "99999999999999999999"])
def test_bad_numbers_of_segments(here: Here, sudokus: Path, numbers: str) -> None:
    refused(here("hrm", "eval", str(sudokus), "--segments", numbers), "--segments")


def test_odd_folders_are_refused_and_left_as_they_are(
    here: Here, sudokus: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "odd/index.html").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/predictions.npz").symlink_to(tmp_path / "file")
    before = sorted(tmp_path.rglob("*"))
    for output, message in {
        "file": "cannot be made",
        "file/below": "cannot be made",
        "/proc/lockstep": "cannot be made",
        "full": "holds what is not of a page (mine.txt)",
        "odd": "holds what is not of a page (index.html)",
        "linked": "holds what is not of a page (predictions.npz)",
    }.items():
        refused(here("hrm", "view", str(sudokus), "--output", output), f"{output}: {message}")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_page_that_cannot_be_written_leaves_nothing(
    here: Here, sudokus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    assert here("hrm", "view", str(sudokus), "--output", "old", "--num", "1").returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    monkeypatch.setattr("lockstep.systems.hrm.reports.page.np.savez", full)
    for output in ("new", "old"):
        refused(
            here("hrm", "view", str(sudokus), "--output", output),
            f"--output {output}: cannot be written: No space left on device",
        )
    assert not (tmp_path / "new").exists()
    assert {path: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_a_split_that_there_is_not(here: Here, sudokus: Path, tmp_path: Path) -> None:
    refused(
        here("hrm", "view", str(sudokus), "--output", "view", "--split", "test"),
        "--split test: must be one of train, val",
    )
    assert not (tmp_path / "view").exists()


class Elements(HTMLParser):
    """The elements of a page, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_of_all_there_is(here: Here, sudokus: Path, tmp_path: Path) -> None:
    done = here("hrm", "view", str(sudokus), "--output", "a", "--num", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote a/index.html\nwrote a/predictions.npz\n"
    here("hrm", "view", str(sudokus), "--output", "b", "--num", "5")
    for name in ("index.html", "predictions.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    text = (tmp_path / "a/index.html").read_text(encoding="utf-8")
    page = Elements(text)
    puzzles = [values for tag, values in page.found if "puzzle" in (values.get("class") or "")]
    assert len(puzzles) == 5
    assert [*page.found[0]] == ["html", {"lang": "en"}]
    assert f"{sudokus.name}: puzzles of val" in page.texts  # has <b>&amp; in its name
    assert "<b>" not in text
    (score,) = by_segments(
        load_trained(sudokus, "latest"), *load_trained(sudokus, "latest").puzzles("val"), [4], False
    )
    assert f"{score.accuracy:.2%}" in page.texts
    assert "step 3" in page.texts


def test_a_page_loads_nothing(here: Here, sudokus: Path, tmp_path: Path) -> None:
    here("hrm", "view", str(sudokus), "--output", "view", "--num", "1")
    text = (tmp_path / "view/index.html").read_text(encoding="utf-8")
    for tag, values in Elements(text).found:
        assert tag not in ("link", "img", "iframe", "object", "base", "a")
        assert not {"src", "href", "onload", "srcset"} & {*values}
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|eval\(|innerHTML", text)


def test_predictions_are_those_of_the_model(here: Here, sudokus: Path, tmp_path: Path) -> None:
    done = here("hrm", "view", str(sudokus), "--output", "view", "--segments", "2", "--num", "0",
                "--split", "train")  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = load_trained(sudokus, "latest")
    inputs, labels = run.puzzles("train")
    answers = [answers for _, answers in run.batches(inputs, 2)]
    with np.load(tmp_path / "view/predictions.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["inputs", "labels", "predictions", "q_halt", "segments"]
        assert {arrays[name].dtype.name for name in ("inputs", "labels", "predictions")} == {
            "uint8"
        }
        assert np.array_equal(arrays["inputs"], inputs)
        assert np.array_equal(arrays["labels"], labels)
        assert np.array_equal(
            arrays["predictions"], np.concatenate([found.tokens[1] for found in answers])
        )
        assert np.array_equal(
            arrays["q_halt"], np.concatenate([found.q_halt[1] for found in answers])
        )
        assert arrays["segments"].shape == (24,)


def test_mazes_are_drawn_too(here: Here, mazes: Path, tmp_path: Path) -> None:
    assert here("hrm", "view", str(mazes), "--output", "view").returncode == 0
    page = Elements((tmp_path / "view/index.html").read_text(encoding="utf-8"))
    assert sum(tag == "i" for tag, _ in page.found) == 2 * 3 * 900
