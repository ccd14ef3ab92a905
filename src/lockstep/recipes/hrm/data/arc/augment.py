"""Augmentations of ARC tasks: a symmetry of the square and other colours; black stays black.

An augmented puzzle's name says how to undo it: `<task>_t<symmetry>_<colours>`, where the digit at
place c of the ten is the new colour of colour c. An original has the name of its task. Names with
`|||` in place of each `_`, as the recursive model's code writes them, are read too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.parsing import shown
from lockstep.recipes.hrm.data.arc.tasks import Example, Task
from lockstep.recipes.hrm.data.arc.tokens import NUM_COLOURS, SIDE, Grid, to_tokens
from lockstep.recipes.hrm.data.dihedral import NUM_SYMMETRIES, inverse, transformed

_DRAWS_FOR_EACH = 5
"""Draws for each augmentation that is asked for; a task may not have as many different ones."""

_NAME = re.compile(
    r"(?P<task>.+)(?P<separator>_|\|\|\|)t(?P<symmetry>[0-7])(?P=separator)(?P<colours>0[1-9]{9})"
)
_LIKE_NAME = re.compile(r".+(_|\|\|\|)t\d+(_|\|\|\|)\d*")


@dataclass(frozen=True)
class Augmentation:
    """An augmentation.

    Attributes:
        symmetry: number of the symmetry, see `dihedral.transformed`; it is applied to a grid of
            the new colours.
        colours: the new colour of each colour, a permutation of 0..9 with 0 in its place.
    """

    symmetry: int = 0
    colours: tuple[int, ...] = tuple(range(NUM_COLOURS))

    def name(self, task: str) -> str:
        """The name of a task's puzzle that is made by it."""
        return f"{task}_t{self.symmetry}_{''.join(map(str, self.colours))}"

    def __call__(self, grid: Grid) -> Grid:
        """What it makes of a grid."""
        return transformed(np.array(self.colours, np.uint8)[grid], self.symmetry)

    def undo(self, grid: Grid) -> Grid:
        """The grid of which it makes this one."""
        return np.argsort(self.colours).astype(np.uint8)[transformed(grid, inverse(self.symmetry))]

    def task(self, task: Task) -> Task:
        """What it makes of all grids of a task."""
        demonstrations, tests = (
            tuple(Example(self(pair.question), self(pair.answer)) for pair in pairs)
            for pairs in (task.demonstrations, task.tests)
        )
        return Task(self.name(task.name), demonstrations, tests)


def parse_name(name: str) -> tuple[str, Augmentation]:
    """The task of a puzzle identifier's name, and the augmentation that made it.

    Raises:
        DataError: the name ends like an augmentation's, and is none.
    """
    found = _NAME.fullmatch(name)
    if not found:
        if _LIKE_NAME.fullmatch(name):
            raise DataError(f"identifier {shown(name)}: names no augmentation: <task>_t<0-7>_<ten>")
        return name, Augmentation()
    colours = tuple(map(int, found["colours"]))
    if len(set(colours)) < NUM_COLOURS:
        raise DataError(f"identifier {shown(name)}: names a colour twice")
    return found["task"], Augmentation(int(found["symmetry"]), colours)


def invert(name: str, grid: Grid) -> Grid:
    """A grid of an augmented puzzle as one of its task.

    Args:
        name: name of the puzzle's identifier.
        grid: colours [rows, columns].

    Raises:
        DataError: as `parse_name`.
    """
    return parse_name(name)[1].undo(grid)


def augmented(task: Task, count: int, generator: np.random.Generator) -> list[Task]:
    """A task and up to `count` augmentations of it, all different in some grid.

    There are fewer where a task is symmetric, or has few colours: draws are limited.
    """
    found = [task]
    seen = {_digest(task)}
    for _ in range(_DRAWS_FOR_EACH * count):
        if len(found) > count:
            break
        colours = (0, *(1 + generator.permutation(NUM_COLOURS - 1)).tolist())
        made = Augmentation(int(generator.integers(NUM_SYMMETRIES)), colours).task(task)
        digest = _digest(made)
        if digest not in seen:
            seen.add(digest)
            found.append(made)
    return found


def _digest(task: Task) -> bytes:
    """SHA-256 of all pairs, whatever their order."""
    return hashlib.sha256(b"".join(sorted(map(_pair_digest, _pairs(task))))).digest()


def _pair_digest(pair: Example) -> bytes:
    sha = hashlib.sha256()
    for grid in (pair.question, pair.answer):
        sha.update(bytes(grid.shape) + grid.tobytes())
    return sha.digest()


def _pairs(task: Task) -> Iterator[Example]:
    yield from task.demonstrations
    yield from task.tests


def encoded(
    pairs: tuple[Example, ...], generator: np.random.Generator | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Inputs and labels [n, 900] of some pairs of grids.

    Args:
        pairs: at least one.
        generator: if given, each pair but one lies at a place in the field that is drawn, the
            question and the answer at the same one. The test has all of them in the corner, so one
            pair of a puzzle is there in training too.
    """
    in_corner = int(generator.integers(len(pairs))) if generator else 0
    inputs, labels = [], []
    for number, pair in enumerate(pairs):
        below = right = 0
        if generator and number != in_corner:
            rows, columns = np.maximum(pair.question.shape, pair.answer.shape)
            below = int(generator.integers(SIDE - rows + 1))
            right = int(generator.integers(SIDE - columns + 1))
        inputs.append(to_tokens(pair.question, below, right))
        labels.append(to_tokens(pair.answer, below, right))
    return np.stack(inputs), np.stack(labels)
