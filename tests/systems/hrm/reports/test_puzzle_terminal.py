"""Puzzles as text: what is read and refused, and what is printed of answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.maze import mazes, to_text, to_tokens
from lockstep.systems.hrm.data.sudoku import Solver
from lockstep.systems.hrm.data.sudoku_board import board_of
from lockstep.systems.hrm.reports.rules import Kind, kind_of
from lockstep.systems.hrm.reports.terminal import (
    CHANGED,
    FILLED,
    GIVEN,
    MISTAKE,
    Puzzle,
    given_text,
    lines,
    looks,
    num_mistakes,
    numbered,
    parse,
    probability,
)
from lockstep.systems.hrm.reports.trained_model import Answers

SUDOKU, MAZE = kind_of(6, 16), kind_of(6, 900)
QUESTION = next(mazes(0, Use.TEST)).questions[0]
LINES = [to_text(QUESTION)[start : start + 30] for start in range(0, 900, 30)]


@settings(max_examples=30)
@given(st.sampled_from([4, 6, 9]), st.integers(0, 50), st.data())
def test_any_blanks_and_white_space_of_a_sudoku(side: int, seed: int, data: st.DataObject) -> None:
    board = board_of(side)
    digits = Solver(board).random_solution(keyed(seed, Use.TEST))
    digits[[*data.draw(st.sets(st.integers(0, board.cells - 1)))]] = 0
    text = ""
    for digit in digits.tolist():
        text += str(digit) if digit else data.draw(st.sampled_from("0."))
        text += data.draw(st.sampled_from(["", "", " ", "\n", "\t", " \r\n"]))
    assert given_text(text) == (text, "puzzle")
    tokens = parse(text, kind_of(side + 2, side**2), "puzzle")
    assert tokens.tolist() == (digits + 1).tolist()


@settings(max_examples=30)
@given(st.text(max_size=40), st.sampled_from([SUDOKU, MAZE, kind_of(12, 900)]))
def test_any_text_is_a_puzzle_or_an_error_of_one_message(text: str, kind: Kind) -> None:
    message, shape = "", None
    try:
        shape = parse(text, kind, "here").shape
    except LockstepError as error:
        message = str(error)
    assert shape == (kind.cells,) or (message.startswith("here: ") and "\n" not in message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has 0 cells; this run's Sudokus have 16 \(4x4\)"),
        ("1" + 14 * ".", "has 15 cells"),
        (81 * ".", "has 81 cells; this run's Sudokus have 16"),
        ("5" + 15 * ".", "cell 1 is '5'; cells must be digits 1 to 4, or 0 or '.'"),
        ("1x" + 14 * ".", "cell 2 is 'x'"),
        ("²" + 15 * ".", "cell 1 is '²'"),
        ("1..1" + 12 * ".", "contradict one another: 1 in row 1, column 1, 1 in row 1, column 4"),
        ("2...2" + 11 * ".", "contradict .* 2 in row 2, column 1"),
        ("3....3" + 10 * ".", "contradict .* 3 in row 2, column 2"),
    ],
)
def test_bad_sudokus(text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^here: .*{message}"):
        parse(text, SUDOKU, "here")


@pytest.mark.parametrize(
    "text", ["\n".join(LINES), "\r\n".join(LINES) + "\r\n", "".join(LINES), "\n".join(LINES) + "\n"]
)
def test_a_maze_of_lines_or_of_one(text: str) -> None:
    assert np.array_equal(parse(text, MAZE, "here"), QUESTION)


CLOSED = [row.replace(" ", "#") for row in LINES]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has 0 lines; this run's mazes have 30"),
        (LINES[:-1], "has 29 lines"),
        ([*LINES[:3], LINES[3][:-1], *LINES[4:]], "line 4 has 29 characters"),
        (["o" + LINES[0][1:], *LINES[1:]], "line 1 has 'o'; a maze is of"),
        (["S" + LINES[0][1:], *LINES[1:]], "has 2 'S'; a maze has one"),
        ([row.replace("G", " ") for row in LINES], "has 0 'G'"),
        (CLOSED, "no way leads from S to G"),
    ],
)
def test_bad_mazes(lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"^here: {message}"):
        parse("\n".join(lines), MAZE, "here")


def test_other_puzzles_have_no_text() -> None:
    with pytest.raises(ConfigError, match=r"cannot be given as text; name one .* val:1"):
        parse("1", kind_of(12, 900), "here")


def test_a_file_holds_a_puzzle(tmp_path: Path) -> None:
    path = tmp_path / "puzzle"
    path.write_text("12\n")
    assert given_text(str(path)) == ("12\n", str(path))
    (tmp_path / "link").symlink_to(path)
    assert given_text(str(tmp_path / "link"))[0] == "12\n"


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"." * (1 << 20) + b".")
    for name, message in {
        "missing": "is neither a file, nor val: and a number, nor a Sudoku of digits",
        "binary": "is not text",
        "large": "cannot be read: is larger than",
        "": "cannot be read: Is a directory",
        "long" * 2000: "cannot be read: File name too long",
        "nul\0": "is not text",
    }.items():
        with pytest.raises(DataError, match=f"^puzzle .*: {message}"):
            given_text(f"{tmp_path}/{name}")


def test_puzzles_of_validation_have_numbers_from_1() -> None:
    assert [numbered(text, 12) for text in ("val:1", "val:12", "12", "a")] == [0, 11, None, None]
    for text in ("val:", "val:0", "val:13", "val:-1", "val:1.0", "val:x", "val:" + 400 * "9"):
        with pytest.raises(ConfigError, match=r"^puzzle 'val:.*; there are val:1 to val:12$"):
            numbered(text, 12)


SMALL_MAZE = kind_of(6, 9)
SOLUTION = np.array([int(digit) + 1 for digit in "1234341221434321"], np.uint8)
CLUES = np.where(np.arange(16) < 2, SOLUTION, 1).astype(np.uint8)


def test_each_cell_is_what_it_is() -> None:
    before, answer = SOLUTION.copy(), SOLUTION.copy()
    before[6] = 1
    answer[[1, 15]] = 5  # a clue is changed, and a digit wrong: 4, as in 3, 5, 10 and 12
    expected = np.full(16, FILLED)
    expected[0], expected[6], expected[[1, 3, 5, 10, 12, 15]] = GIVEN, CHANGED, MISTAKE
    look = looks(SUDOKU, Puzzle(CLUES, SOLUTION), before, answer)
    assert look.tolist() == expected.tolist()
    assert num_mistakes(SUDOKU, Puzzle(CLUES, SOLUTION), answer) == 2


def test_cells_of_a_maze_that_stay_free_are_nothing() -> None:
    question, answer = to_tokens("S    #  G"), to_tokens("So  o# oG")
    look = looks(SMALL_MAZE, Puzzle(question, answer), question, answer)
    assert look.tolist() == [GIVEN, CHANGED, -1, -1, CHANGED, GIVEN, -1, CHANGED, GIVEN]
    look = looks(SMALL_MAZE, Puzzle(question, answer), answer, answer)
    assert look.tolist() == [GIVEN, FILLED, -1, -1, FILLED, GIVEN, -1, FILLED, GIVEN]


def test_marks_of_a_whole_puzzle() -> None:
    wrong = SOLUTION.copy()
    wrong[15] = 3
    answers = Answers(
        np.stack([wrong, SOLUTION, SOLUTION])[:, None],
        np.array([[0.0], [2.0], [2.0]], np.float32),
        np.array([[False], [True], [True]]),
    )
    shown, solved = lines(SUDOKU, Puzzle(CLUES, SOLUTION), answers, False, False)
    assert solved
    assert [line.plain for line in shown] == [
        "+ filled in, * changed since the segment before, ! mistake",
        "",
        "segment 1: halting 0.500, 14 cells changed, 1 mistake",
        "   1 2  *3*4",
        "  *3*4  *1!2",
        "",
        "  *2*1  *4*3",
        "  *4*3  !2!2",
        "",
        "segment 2: halting 0.881, 1 cell changed, 0 mistakes",
        "   1 2  +3+4",
        "  +3+4  +1+2",
        "",
        "  +2+1  +4+3",
        "  +4+3  +2*1",
        "",
        "segment 3: halting 0.881, 0 cells changed, 0 mistakes",
        "solved; would have halted after 2 segments",
    ]


def test_styles_say_the_same_as_marks() -> None:
    answers = Answers(SOLUTION[None, None], np.zeros((1, 1), np.float32), np.zeros((1, 1), bool))
    shown, _ = lines(SUDOKU, Puzzle(CLUES, None), answers, False, True)
    row = shown[3]
    assert row.plain == "   1 2   3 4"
    styles = [str(span.style) for span in row.spans]
    assert styles == ["dim", "dim", "bold black on yellow", "bold black on yellow"]


@pytest.mark.parametrize(("logit", "value"), [(0, 0.5), (2, 0.880797), (-1e30, 0), (1e30, 1)])
def test_probabilities(logit: float, value: float) -> None:
    assert probability(logit) == pytest.approx(value)
