"""No solution of the test occurs in training, in whatever guise."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_dataset
from lockstep.systems.hrm.data.sources import Options
from lockstep.systems.hrm.data.sudoku import Solver
from lockstep.systems.hrm.data.sudoku_board import (
    Grid,
    SolutionSplit,
    board_of,
    canonical,
    draw_symmetries,
    to_grids,
)

SIZES = {4: Options(size=4, train=150, test=60), 6: Options(size=6, train=30, test=15, augment=20),
         9: Options(size=9, train=4, test=2, augment=8)}  # fmt: skip


def answers(folder: Path) -> dict[str, Grid]:
    return {
        split: to_grids(np.array(found.sets["all"].labels))
        for split, found in read_dataset(folder).items()
    }


@pytest.mark.parametrize("seed", [0, 7])
def test_no_relabelling_of_a_small_test_grid_is_in_training(tmp_path: Path, seed: int) -> None:
    options = Options(size=4, train=300, test=100, augment=23, seed=seed)
    build("sudoku", tmp_path / "data", options)
    found = answers(tmp_path / "data")
    train = {grid.tobytes() for grid in found["train"]}
    test = {grid.tobytes() for grid in found["test"]}
    assert len(train) == 9 * 24
    assert 40 < len(test) <= 3 * 24
    for names in permutations(range(1, 5)):
        table = np.array([0, *names], np.uint8)
        assert not train & {table[grid].tobytes() for grid in found["test"]}


@pytest.mark.parametrize("size", SIZES)
def test_no_class_of_a_test_grid_is_in_training(tmp_path: Path, size: int) -> None:
    build("sudoku", tmp_path / "data", SIZES[size])
    split = SolutionSplit(board_of(size), 0)
    found = answers(tmp_path / "data")
    forms = {
        name: {split.common_form(grid) for grid in np.unique(grids, axis=0)[:200]}
        for name, grids in found.items()
    }
    assert forms["train"]
    assert forms["test"]
    assert not forms["train"] & forms["test"]


@pytest.mark.parametrize("size", SIZES)
@given(seed=st.integers(0, 2**63 - 1), split_seed=st.integers(0, 2**63 - 1))
@settings(max_examples=10)
def test_the_split_is_closed_under_the_symmetries(size: int, seed: int, split_seed: int) -> None:
    board = board_of(size)
    split = SolutionSplit(board, split_seed)
    generator = keyed(seed, Use.AUGMENT)
    answer = Solver(board).random_solution(generator)
    is_test = split.is_test(answer)
    for other in draw_symmetries(board, generator, 5)(answer):
        assert split.is_test(other) == is_test


def test_both_large_classes_of_small_grids_would_mix() -> None:
    """Why 4x4 boards are split by relabelling, and their rows and columns stay in place."""
    board = board_of(4)
    split = SolutionSplit(board, 0)
    sides: dict[bytes, set[bool]] = {}
    solver = Solver(board)
    for number in range(500):
        grid = solver.random_solution(np.random.default_rng(number))
        sides.setdefault(canonical(board, grid).tobytes(), set()).add(split.is_test(grid))
    assert len(sides) == 2
    assert {False, True} in sides.values()


def test_a_quarter_of_the_small_classes_is_for_the_test_whatever_the_seed() -> None:
    solver = Solver(board_of(4))
    grids = [solver.random_solution(np.random.default_rng(number)) for number in range(300)]
    chosen = set()
    for seed in range(20):
        split = SolutionSplit(board_of(4), seed)
        forms = {split.common_form(grid): split.is_test(grid) for grid in grids}
        assert len(forms) == 12
        assert sum(forms.values()) == 3
        chosen.add(tuple(sorted(form for form, is_test in forms.items() if is_test)))
    assert len(chosen) > 10


def test_test_puzzles_are_not_augmented_and_none_is_there_twice(tmp_path: Path) -> None:
    build("sudoku", tmp_path / "data", SIZES[4])
    found = read_dataset(tmp_path / "data")
    test = found["test"].sets["all"]
    assert len(test.inputs) == 60 == len(test.group_indices) - 1
    assert len(np.unique(test.inputs, axis=0)) == 60
    train = found["train"].sets["all"]
    assert np.diff(train.group_indices).tolist() == [11] * 150
    firsts = train.inputs[train.puzzle_indices[train.group_indices[:-1]]]
    assert len(np.unique(firsts, axis=0)) == 150
    assert (train.labels[:] >= 2).all()
    solver = Solver(board_of(4))
    for question, answer in zip(test.inputs, test.labels, strict=True):
        assert np.array_equal(solver.solve(to_grids(question)), to_grids(answer))
        assert solver.count(to_grids(question)) == 1
