"""Rules, solver, symmetries and puzzles of all boards, against counting by brute force."""

from __future__ import annotations

import time
from itertools import islice, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.sudoku import Solver, dig, puzzles
from lockstep.systems.hrm.data.sudoku_board import (
    Board,
    Grid,
    are_solutions,
    board_of,
    canonical,
    draw_symmetries,
    relabelled,
    to_grids,
    to_tokens,
)

SIDES = (4, 6, 9)
seeds = st.integers(0, 2**63 - 1)


def follows_rules(board: Board, grid: Grid) -> bool:
    """The rules, cell by cell, written a second time."""
    units: dict[tuple[str, int, int], set[int]] = {}
    for cell, digit in enumerate(grid.tolist()):
        row, column = divmod(cell, board.side)
        for unit in (
            ("row", row, 0),
            ("column", column, 0),
            ("box", row // board.box_rows, column // board.box_columns),
        ):
            units.setdefault(unit, set()).add(digit)
    wanted = set(range(1, board.side + 1))
    return len(units) == 3 * board.side and all(unit == wanted for unit in units.values())


@pytest.fixture(scope="module")
def small_grids() -> Grid:
    """All solution grids of the 4x4 board, from all arrangements of four permutations."""
    rows = list(permutations(range(1, 5)))
    grids = np.array(list(product(rows, repeat=4)), np.uint8).reshape(-1, 16)
    # Columns and boxes by set size: independent of `are_solutions`.
    square = grids.reshape(-1, 4, 4)
    boxes = square.reshape(-1, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 4)
    bits = 1 << square.astype(np.int64)
    right = (np.bitwise_or.reduce(bits, axis=1) == 30).all(axis=1)
    right &= (np.bitwise_or.reduce(1 << boxes.astype(np.int64), axis=2) == 30).all(axis=1)
    return grids[right]


def test_there_are_288_small_grids(small_grids: Grid) -> None:
    board = board_of(4)
    assert len(small_grids) == 288
    assert are_solutions(board, small_grids).all()
    assert Solver(board).count(np.zeros(16, np.uint8), limit=10_000) == 288
    assert all(follows_rules(board, grid) for grid in small_grids)


def test_the_solver_counts_as_brute_force_does(small_grids: Grid) -> None:
    solver = Solver(board_of(4))
    generator = np.random.default_rng(0)
    for _ in range(400):
        grid = small_grids[generator.integers(288)] * (generator.random(16) < 0.35)
        if generator.random() < 0.3:
            grid[generator.integers(16)] = generator.integers(1, 5)
        fits = ((small_grids == grid) | (grid == 0)).all(axis=1)
        assert solver.count(grid, limit=1000) == fits.sum()
        assert solver.count(grid) == min(2, fits.sum())
        solved = solver.solve(grid)
        if fits.any():
            assert solved is not None
            assert (small_grids[fits] == solved).all(axis=1).any()
        else:
            assert solved is None


def test_each_small_grid_is_solved_from_any_of_its_unique_puzzles(small_grids: Grid) -> None:
    solver = Solver(board_of(4))
    for number, grid in enumerate(small_grids):
        question = dig(solver, grid, np.random.default_rng(number))
        fits = ((small_grids == question) | (question == 0)).all(axis=1)
        assert fits.sum() == 1
        assert np.array_equal(solver.solve(question), grid)
        for clue in np.flatnonzero(question):
            fewer = question.copy()
            fewer[clue] = 0
            assert solver.count(fewer) == 2, "a minimal puzzle needs each of its clues"


def test_small_grids_are_in_two_classes_and_twelve_up_to_digits(small_grids: Grid) -> None:
    board = board_of(4)
    forms = [canonical(board, grid).tobytes() for grid in small_grids]
    assert sorted(forms.count(form) for form in set(forms)) == [96, 192]
    assert len({relabelled(board, grid).tobytes() for grid in small_grids}) == 12


def naive_canonical(board: Board, grid: Grid) -> bytes:
    """The least of all symmetric grids, by going through all of them."""

    def lines(thickness: int) -> list[list[int]]:
        bands = [list(range(first, first + thickness)) for first in range(0, board.side, thickness)]
        inner = product(*(permutations(band) for band in bands))
        return [sum(order, ()) for bands in inner for order in permutations(bands)]

    square = grid.reshape(board.side, board.side)
    squares = [square, square.T] if board.box_rows == board.box_columns else [square]
    return min(
        relabelled(board, one[np.ix_(rows, columns)].reshape(-1)).tobytes()
        for one in squares
        for rows in lines(board.box_rows)
        for columns in lines(board.box_columns)
    )


def test_the_common_form_is_the_least_of_all_symmetric_grids(small_grids: Grid) -> None:
    for grid in small_grids[::24]:
        assert canonical(board_of(4), grid).tobytes() == naive_canonical(board_of(4), grid)
    board = board_of(6)
    for number in range(3):
        grid = Solver(board).random_solution(np.random.default_rng(number))
        assert canonical(board, grid).tobytes() == naive_canonical(board, grid)


@pytest.mark.slow
def test_middle_grids_are_in_49_classes() -> None:
    board = board_of(6)
    solver = Solver(board)
    generator = np.random.default_rng(0)
    drawn = (solver.random_solution(generator) for _ in range(25_000))
    assert len({canonical(board, grid).tobytes() for grid in drawn}) == 49


@pytest.mark.parametrize("side", SIDES)
@given(seed=seeds)
@settings(max_examples=12)
def test_symmetries_keep_the_rules_the_class_and_the_one_solution(side: int, seed: int) -> None:
    board, generator = board_of(side), keyed(seed, Use.AUGMENT)
    solver = Solver(board)
    answer = solver.random_solution(generator)
    assert follows_rules(board, answer)
    question = dig(solver, answer, generator, num_clues=board.cells // 2)
    symmetries = draw_symmetries(board, generator, 3)
    form = canonical(board, answer)
    for ours, theirs in zip(symmetries(question), symmetries(answer), strict=True):
        assert follows_rules(board, theirs)
        assert np.array_equal(ours[ours != 0], theirs[ours != 0])
        assert (ours != 0).sum() == (question != 0).sum()
        assert solver.count(ours) == 1
        assert np.array_equal(solver.solve(ours), theirs)
        assert np.array_equal(canonical(board, theirs), form)


@pytest.mark.parametrize(("side", "count"), [(4, 24), (6, 6), (9, 6)])
def test_each_symmetry_is_drawn(side: int, count: int) -> None:
    board = board_of(side)
    drawn = draw_symmetries(board, np.random.default_rng(0), 2000)
    assert len(np.unique(drawn.digits, axis=0)) == min(2000, count) or side > 4
    rows, columns = np.divmod(drawn.cells, side)
    square_rows = rows.reshape(-1, side, side)
    turned = (square_rows[:, :, 0] != square_rows[:, :, 1]).any(axis=1)
    if side == 4:
        assert (drawn.cells == np.arange(16)).all()
    elif side == 6:
        assert not turned.any()
    else:
        assert 0.45 < turned.mean() < 0.55
    if side > 4:
        assert set(rows[:, 0]) == set(columns[:, 0]) == set(range(side))
    same = np.random.default_rng(0)
    assert np.array_equal(draw_symmetries(board, same, 2000).cells, drawn.cells)


def test_boxes_of_six_are_two_rows_of_three() -> None:
    assert board_of(6).boxes.reshape(6, 6).tolist() == [
        [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1],
        [2, 2, 2, 3, 3, 3], [2, 2, 2, 3, 3, 3],
        [4, 4, 4, 5, 5, 5], [4, 4, 4, 5, 5, 5],
    ]  # fmt: skip


def test_tokens_are_digits_and_one() -> None:
    grid = np.array([0, 1, 9], np.uint8)
    assert to_tokens(grid).tolist() == [1, 2, 10]
    assert np.array_equal(to_grids(to_tokens(grid)), grid)
    assert [board_of(side).vocab_size for side in SIDES] == [6, 8, 11]


@pytest.mark.parametrize(("side", "clues"), [(4, 7), (6, 16), (9, 34)])
def test_clues_are_as_many_as_asked_for(side: int, clues: int) -> None:
    board = board_of(side)
    solver = Solver(board)
    for made in islice(puzzles(board, 0, Use.TRAIN, num_clues=clues), 5):
        assert (made.questions != 0).sum() == clues
        assert solver.count(made.questions[0]) == 1
        assert np.array_equal(solver.solve(made.questions[0]), made.answers[0])


def test_ratings_are_as_high_as_asked_for() -> None:
    board = board_of(6)
    solver = Solver(board)
    for made in islice(puzzles(board, 0, Use.TRAIN, rating=8), 3):
        assert solver.rating(made.questions[0]) >= 8


def test_a_rating_counts_digits_that_were_tried_in_vain() -> None:
    solver = Solver(board_of(4))
    solution = solver.solve(np.zeros(16, np.uint8))
    assert solution is not None
    assert solver.rating(solution) == 0
    # A well-known 9x9 puzzle that needs guesses, and an easy one that needs none.
    hard = "800000000003600000070090200050007000000045700000100030001000068008500010090000400"
    easy = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
    ratings = [
        Solver(board_of(9)).rating(np.array(list(map(int, text)), np.uint8))
        for text in (hard, easy)
    ]
    assert ratings[0] > 100
    assert ratings[1] == 0


def test_grids_that_contradict_themselves_have_no_solution() -> None:
    grid = np.zeros(81, np.uint8)
    grid[[0, 1]] = 5
    assert Solver(board_of(9)).count(grid) == 0
    assert Solver(board_of(9)).solve(grid) is None


def test_sizes_without_a_board_are_refused() -> None:
    with pytest.raises(ConfigError, match="size=5: must be one of 4, 6, 9"):
        board_of(5)


def test_puzzles_that_cannot_be_found_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no more than 0 4x4 puzzles were found"):
        next(puzzles(board_of(4), 0, Use.TRAIN, rating=10**6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "count", "seconds"), [(4, 2000, 2), (6, 2000, 20), (9, 1000, 120)]
)
def test_puzzles_are_made_quickly(side: int, count: int, seconds: float) -> None:
    start = time.process_time()
    assert len(list(islice(puzzles(board_of(side), 0, Use.TRAIN), count))) == count
    assert time.process_time() - start < seconds
