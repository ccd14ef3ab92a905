"""The names of puzzle identifiers, checked against the puzzles that they name.

A name of ARC contains a puzzle's task and augmentation, on which the votes depend.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arc import (
    FIRST_COLOUR,
    NUM_COLOURS,
    SEQ_LEN,
    SIDE,
    VOCAB_SIZE,
    Augmentation,
    Grid,
    parse_name,
    to_grid,
)
from lockstep.systems.hrm.data.arrays import transformed
from lockstep.systems.hrm.data.format import BLANK_IDENTIFIER, IDENTIFIERS_FILE, read_identifiers
from lockstep.systems.hrm.puzzles import Puzzles

_AGAIN = f"get the dataset again, with its {IDENTIFIERS_FILE}"


def checked_names(folder: Path, puzzles: Mapping[str, Puzzles]) -> list[str]:
    """The names of a dataset's puzzle identifiers, in order.

    Args:
        folder: folder of the dataset.
        puzzles: its puzzles, `train` and `val`.

    Raises:
        DataError: the file is missing or damaged, the numbers of names and of identifiers differ, a
            name occurs twice, a puzzle has the blank one; or, for ARC, as `check_questions`.
    """
    path, test = folder / IDENTIFIERS_FILE, puzzles["val"]
    names = read_identifiers(folder)
    if len(names) != test.num_identifiers:
        raise DataError(
            f"{folder}: has {len(names)} names in {IDENTIFIERS_FILE} for {test.num_identifiers} "
            "puzzle identifiers; get the dataset again"
        )
    known: dict[str, int] = {}
    for number, name in enumerate(names):
        first = known.setdefault(name, number)
        if first != number and name != BLANK_IDENTIFIER:
            raise DataError(
                f"{path}: number {number}: {shown(name)}: is the name of number {first} too; "
                f"{_AGAIN}"
            )
    for split in puzzles.values():
        for number in np.unique(split.identifiers).tolist():
            if number != split.blank and names[number] == BLANK_IDENTIFIER:
                raise DataError(
                    f"{path}: number {number}: {BLANK_IDENTIFIER!r}: is the name of no puzzle, "
                    f"and a puzzle has this identifier; {_AGAIN}"
                )
    if (test.vocabulary, test.length) == (VOCAB_SIZE, SEQ_LEN):
        check_questions(folder, test, names)
    return names


def names_digest(names: Sequence[str]) -> str:
    """SHA-256 of names, in order."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def check_questions(folder: Path, test: Puzzles, names: Sequence[str]) -> None:
    """Check that a test of ARC has one group for each task, and that augmentations agree.

    Inputs and labels of a question, with the augmentation of their name undone, must be the same
    for all augmentations of a task. 100,000 puzzles take less than a second.

    Args:
        folder: folder of the dataset.
        test: its test.
        names: names of its identifiers.

    Raises:
        DataError: they do not agree, a puzzle has no name or one that names no augmentation, two
            puzzles share an identifier, a group has puzzles of several tasks, or a task has several
            groups.
    """
    where = folder / IDENTIFIERS_FILE
    _check_each_once(folder, test)
    try:
        tasks, symmetries, colours = _parsed([names[number] for number in test.identifiers])
    except DataError as error:
        raise DataError(f"{where}: {error}; {_AGAIN}") from None
    _check_groups(folder, test, tasks)
    counts = np.diff(test.puzzles)
    for first, last in zip(test.groups[:-1].tolist(), test.groups[1:].tolist(), strict=True):
        for number in range(int(counts[first:last].max())):
            which = first + np.flatnonzero(counts[first:last] > number)
            rows = test.puzzles[which] + number
            for side, tokens in (("inputs", test.inputs), ("labels", test.labels)):
                fields = tokens.numpy()[rows].reshape(-1, SIDE, SIDE)
                agree = _agree(fields, symmetries[which], colours[which])
                if agree.all():
                    continue
                wrong = int(np.argmin(agree))
                pair = [shown(names[test.identifiers[which[index]]]) for index in (0, wrong)]
                raise DataError(
                    f"{where}: {pair[0]} and {pair[1]}: {side} of the test's examples {rows[0]} and"
                    f" {rows[wrong]} are not one grid once turned back as these names say; {_AGAIN}"
                )


def _parsed(
    names: Sequence[str],
) -> tuple[list[str], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Tasks, symmetries [P] and new colours [P, 10] of names.

    Raises:
        DataError: as `parse_name`.
    """
    tasks, symmetries, colours = [], bytearray(), bytearray()
    for name in names:  # as bytes: a million small objects would be slow
        task, augmentation = parse_name(name)
        tasks.append(task)
        symmetries.append(augmentation.symmetry)
        colours += bytes(augmentation.colours)
    return (
        tasks,
        np.frombuffer(symmetries, np.uint8),
        np.frombuffer(colours, np.uint8).reshape(-1, NUM_COLOURS),
    )


def _check_each_once(folder: Path, test: Puzzles) -> None:
    """Check that each puzzle has an identifier of its own.

    Raises:
        DataError: one has none, or that of another one.
    """
    identifiers, firsts, counts = np.unique(test.identifiers, return_index=True, return_counts=True)
    without = np.flatnonzero(identifiers == test.blank)
    if len(without):
        raise DataError(
            f"{folder}: puzzle {firsts[without[0]]} of the test has identifier {test.blank}, "
            f"{BLANK_IDENTIFIER!r}: no name says of which task it is; get the dataset again"
        )
    if int(counts.max()) > 1:
        raise DataError(
            f"{folder}: identifier {identifiers[np.argmax(counts)]} is that of {counts.max()} "
            "puzzles of the test: each must have its own; get the dataset again"
        )


def _check_groups(folder: Path, test: Puzzles, tasks: Sequence[str]) -> None:
    """Check that groups and tasks are the same, given the task of each puzzle.

    Raises:
        DataError: a group has several tasks, or a task several groups.
    """
    groups: dict[str, int] = {}
    of_puzzle = np.repeat(np.arange(len(test.groups) - 1), np.diff(test.groups)).tolist()
    firsts = test.groups[:-1].tolist()
    for task, group in zip(tasks, of_puzzle, strict=True):
        if task != tasks[firsts[group]]:
            raise DataError(
                f"{folder}: group {group} of the test has puzzles of the tasks "
                f"{shown(tasks[firsts[group]])} and {shown(task)} by their names in "
                f"{IDENTIFIERS_FILE}: must be of one; get the dataset again"
            )
        if groups.setdefault(task, group) != group:
            raise DataError(
                f"{folder}: task {shown(task)} has puzzles in the groups {groups[task]} and "
                f"{group} of the test by their names in {IDENTIFIERS_FILE}: must be in one; "
                "get the dataset again"
            )


def _agree(
    fields: Grid, symmetries: npt.NDArray[np.uint8], colours: npt.NDArray[np.uint8]
) -> npt.NDArray[np.bool_]:
    """Whether each field is what its augmentation makes of the first field's original.

    Args:
        fields: tokens [K, 30, 30].
        symmetries: of their augmentations [K].
        colours: the new colours of their augmentations [K, 10].

    Returns:
        [K]; false for a field, including the first one, with colours outside the grid in its
        corner.
    """
    first = Augmentation(int(symmetries[0]), tuple(colours[0].tolist()))
    grid = first.undo(to_grid(fields[0]))
    agree: npt.NDArray[np.bool_] = (fields >= FIRST_COLOUR).sum(axis=(1, 2)) == grid.size
    for symmetry in np.unique(symmetries).tolist():
        which = np.flatnonzero(symmetries == symmetry)
        turned = transformed(grid, symmetry)
        rows, columns = turned.shape
        expected = colours[which][:, turned] + np.uint8(FIRST_COLOUR)
        agree[which] &= (fields[which, :rows, :columns] == expected).all(axis=(1, 2))
    return agree
