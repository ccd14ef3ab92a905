"""Mazes: the path is the only shortest one, by a search of the tests' own."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.systems.hrm.data.arrays import NUM_SYMMETRIES, Use, inverse, transformed
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_dataset
from lockstep.systems.hrm.data.maze import canonical, mazes, to_text, to_tokens
from lockstep.systems.hrm.data.sources import Options

Place = tuple[int, int]


def lines(tokens: npt.NDArray[np.uint8]) -> list[str]:
    text = to_text(tokens)
    side = round(len(text) ** 0.5)
    return [text[first : first + side] for first in range(0, len(text), side)]


def shortest(maze: list[str]) -> tuple[int, int]:
    """Steps of the shortest path from S to G, and how many such paths there are."""
    places = {(r, c): mark for r, row in enumerate(maze) for c, mark in enumerate(row)}
    start = next(place for place, mark in places.items() if mark == "S")
    goal = next(place for place, mark in places.items() if mark == "G")
    steps: dict[Place, int] = {start: 0}
    ways: dict[Place, int] = {start: 1}
    queue = deque([start])
    while queue:
        row, column = here = queue.popleft()
        for there in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if places.get(there, "#") == "#":
                continue
            if there not in steps:
                steps[there], ways[there] = steps[here] + 1, 0
                queue.append(there)
            if steps[there] == steps[here] + 1:
                ways[there] += ways[here]
    return steps[goal], ways[goal]


@pytest.mark.parametrize(("side", "least", "count"), [(30, 110, 40), (30, 180, 5), (9, 8, 40)])
def test_the_marked_path_is_the_only_shortest_one(side: int, least: int, count: int) -> None:
    for pair in islice(mazes(1, Use.TRAIN, 0, side, least), count):
        question, answer = lines(pair.questions), lines(pair.answers)
        assert len(question) == side
        length, ways = shortest(question)
        assert length >= least
        assert ways == 1
        assert "".join(answer).count("o") == length - 1
        assert "".join(answer).replace("o", " ") == "".join(question)
        # Along the marks alone it is as far: they are the path and nothing else.
        walled = [row.replace(" ", "#") for row in answer]
        assert shortest(walled) == (length, 1)


def test_mazes_have_walls_around_them_and_no_room_is_shut() -> None:
    for pair in islice(mazes(2, Use.TEST), 10):
        maze = pair.questions.reshape(30, 30)
        for edge in (maze[0], maze[-1], maze[:, 0], maze[:, -1]):
            assert (edge == 1).all()
        # A tree of 14 x 14 rooms has 195 passages.
        assert (maze != 1).sum() == 196 + 195


def test_no_maze_is_in_both_splits_in_whatever_direction() -> None:
    train = list(islice(mazes(0, Use.TRAIN, 0, 6, 4), 6))
    test = list(islice(mazes(0, Use.TEST, 6, 6, 4), 6))
    forms = [canonical(pair.questions.reshape(6, 6)) for pair in train + test]
    assert len(set(forms)) == 12


def test_paths_that_no_maze_has_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"least_length=60: no more mazes of 9x9"):
        next(mazes(0, Use.TRAIN, 0, 9, 60))
    with pytest.raises(ConfigError, match="side=4"):
        next(mazes(0, Use.TRAIN, 0, 4, 2))


def test_texts_and_tokens_are_inverse() -> None:
    assert to_tokens("# SGo").tolist() == [1, 2, 3, 4, 5]
    assert to_text(to_tokens("oG S#")) == "oG S#"
    assert to_tokens("x\u20ac").tolist() == [0, 0]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 7))
def test_each_symmetry_is_undone(rows: int, columns: int, number: int) -> None:
    grid = np.arange(rows * columns).reshape(rows, columns)
    assert np.array_equal(transformed(transformed(grid, number), inverse(number)), grid)


def test_the_symmetries_are_eight_and_numbered_as_published() -> None:
    grid = np.array([[1, 2], [3, 4]])
    made = [transformed(grid, number).reshape(-1).tolist() for number in range(NUM_SYMMETRIES)]
    assert made == [
        [1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2],
        [2, 1, 4, 3], [3, 4, 1, 2], [1, 3, 2, 4], [4, 2, 3, 1],
    ]  # fmt: skip


@settings(max_examples=3)
@given(st.integers(0, 2**63 - 1))
def test_a_dataset_has_the_symmetric_mazes_in_training_only(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("maze") / "data"
    build("maze", folder, Options(train=3, test=2, size=12, seed=seed))
    found = read_dataset(folder)
    train, test = found["train"].sets["all"], found["test"].sets["all"]
    assert np.diff(train.group_indices).tolist() == [8] * 3
    assert len(test.inputs) == 2
    for first in train.group_indices[:-1]:
        group = [train.inputs[place].reshape(12, 12) for place in range(first, first + 8)]
        assert len({maze.tobytes() for maze in group}) == 8
        assert len({canonical(maze) for maze in group}) == 1
    for question, answer in zip(train.inputs, train.labels, strict=True):
        assert shortest(lines(question))[0] == "".join(lines(answer)).count("o") + 1


def test_there_are_seven_symmetric_mazes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--augment 8: a maze has 7 symmetric ones"):
        build("maze", tmp_path / "data", Options(augment=8))
