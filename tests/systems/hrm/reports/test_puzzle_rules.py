"""Rules of answers, against brute force."""

from __future__ import annotations

from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.maze import FREE, PATH, WALL, mazes, solved, to_tokens
from lockstep.systems.hrm.data.sudoku import Solver
from lockstep.systems.hrm.data.sudoku_board import are_solutions, board_of
from lockstep.systems.hrm.reports.rules import is_solved, kind_of, mistakes, repeated

SIDES = (4, 6, 9)


@settings(max_examples=30)
@given(st.sampled_from(SIDES), st.data())
def test_repeated_digits_are_those_of_brute_force(side: int, data: st.DataObject) -> None:
    board = board_of(side)
    cells = board.cells
    grid = np.array(data.draw(st.lists(st.integers(0, side), min_size=cells, max_size=cells)))
    expected = [False] * cells
    for one, other in product(range(cells), repeat=2):
        same_row = one // side == other // side
        same_column = one % side == other % side
        same_box = (
            one // side // board.box_rows == other // side // board.box_rows
            and one % side // board.box_columns == other % side // board.box_columns
        )
        if one != other and grid[one] and grid[one] == grid[other]:
            expected[one] |= same_row or same_column or same_box
    assert repeated(board, grid.astype(np.uint8)).tolist() == expected


@settings(max_examples=30)
@given(st.sampled_from(SIDES), st.integers(0, 99), st.data())
def test_a_sudoku_is_solved_only_by_a_solution_with_its_clues(
    side: int, seed: int, data: st.DataObject
) -> None:
    board, kind = board_of(side), kind_of(side + 2, side**2)
    solution = Solver(board).random_solution(keyed(seed, Use.TEST))
    hidden = data.draw(st.sets(st.integers(0, board.cells - 1)))
    question = solution + 1
    question[[*hidden]] = 1
    assert is_solved(kind, question, solution + 1, None)
    assert not mistakes(kind, question, solution + 1, solution + 1).any()
    cell = data.draw(st.integers(0, board.cells - 1))
    other = solution + 1
    other[cell] = data.draw(st.integers(0, side + 1).filter(lambda token: token != other[cell]))
    assert not is_solved(kind, question, other, None)
    assert not is_solved(kind, question, other, solution + 1)
    assert mistakes(kind, question, other, solution + 1)[cell]
    assert mistakes(kind, question, other, None).any()


def test_another_solution_without_the_clues_is_none() -> None:
    board, kind = board_of(4), kind_of(6, 16)
    one, other = (Solver(board).random_solution(keyed(seed, Use.TEST)) for seed in (0, 1))
    assert are_solutions(board, other[None]).all()
    assert (one != other).any()
    assert not is_solved(kind, one + 1, other + 1, None)
    assert mistakes(kind, one + 1, other + 1, None).tolist() == (one != other).tolist()


def test_clues_are_no_mistakes_and_blanks_are() -> None:
    kind = kind_of(6, 16)
    question = np.array([2, *[1] * 15])
    answer = np.array([2, 2, *[1] * 14])
    assert np.flatnonzero(~mistakes(kind, question, answer, None)).tolist() == [0]


@pytest.mark.parametrize("seed", range(3))
def test_a_maze_is_solved_by_its_shortest_path_only(seed: int) -> None:
    kind = kind_of(6, 121)
    for pairs in islice(mazes(seed, Use.TEST, side=11, least_length=8), 3):
        question, answer = pairs.questions[0], pairs.answers[0]
        assert is_solved(kind, question, answer, None)
        assert not mistakes(kind, question, answer, answer).any()
        assert np.array_equal(solved(question, 11), answer)
        for cell in range(kind.cells):
            wrong = answer.copy()
            wrong[cell] = FREE if answer[cell] == PATH else PATH
            assert not is_solved(kind, question, wrong, None)
            assert np.flatnonzero(mistakes(kind, question, wrong, answer)).tolist() == [cell]


def test_another_path_as_short_is_a_solution_and_a_detour_is_none() -> None:
    kind, question = kind_of(6, 9), to_tokens("S    #  G")
    for text in ("So  o# oG", "S  oo# oG", "S  o #ooG"):
        assert is_solved(kind, question, to_tokens(text), None), text
    for text in ("So   #ooG", "Soooo# oG", "S  oo#ooG", "S    # oG", "S    #  G"):
        assert not is_solved(kind, question, to_tokens(text), None), text


def test_a_maze_without_way_has_no_solution() -> None:
    question = to_tokens("S# ## # G")
    assert solved(question, 3) is None
    assert not is_solved(kind_of(6, 9), question, question, None)
    assert (question == WALL).sum() == 4


def test_other_puzzles_are_solved_by_their_labels() -> None:
    kind = kind_of(12, 900)
    label = np.zeros(900, np.int64)
    label[:4] = 5
    answer = np.full(900, 5)
    assert is_solved(kind, label, answer, label)
    answer[3] = 6
    assert not is_solved(kind, label, answer, label)
    assert np.flatnonzero(mistakes(kind, label, answer, label)).tolist() == [3]


@pytest.mark.parametrize(
    ("vocabulary", "length", "name", "shape"),
    [
        (6, 16, "sudoku", (4, 4)), (8, 36, "sudoku", (6, 6)), (11, 81, "sudoku", (9, 9)),
        (6, 900, "maze", (30, 30)), (6, 81, "maze", (9, 9)), (12, 900, "arc", (30, 30)),
        (12, 81, "tokens", (9, 9)), (7, 10, "tokens", (1, 10)), (256, 900, "tokens", (30, 30)),
    ],
)  # fmt: skip
def test_kinds_by_their_tokens(
    vocabulary: int, length: int, name: str, shape: tuple[int, int]
) -> None:
    kind = kind_of(vocabulary, length)
    assert (kind.name, kind.rows, kind.columns) == (name, *shape)
    assert len(kind.symbols) == vocabulary
    assert len({*kind.symbols}) == vocabulary
