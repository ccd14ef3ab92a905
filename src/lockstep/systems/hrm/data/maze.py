"""Mazes with a shortest path, generated or read from a public CSV file.

A maze is a square of `#` (wall), ` ` (free), one `S` (start) and one `G` (goal); the answer has `o`
on the free cells of the shortest path between them. Tokens are 1..5 in the order of `CHARACTERS`,
0 is padding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data.arrays import NUM_SYMMETRIES, Use, keyed, transformed
from lockstep.systems.hrm.data.format import Puzzle
from lockstep.systems.hrm.data.sources import (
    DEFAULT_COUNT,
    OptionError,
    Options,
    Pairs,
    Row,
    Source,
    choose_pairs,
    pair_source,
    read_rows,
)

CHARACTERS = "# SGo"
VOCAB_SIZE = len(CHARACTERS) + 1
WALL, FREE, START, GOAL, PATH = range(1, VOCAB_SIZE)

SIDE = 30
"""Rows and columns of the published mazes."""

LEAST_LENGTH = 110
"""Steps of the shortest path, at least, as in the published mazes."""

_MOST_SIDE = 64
_MOST_FAILURES = 200

Maze = npt.NDArray[np.uint8]
"""Tokens [side, side]."""

Tokens = npt.NDArray[np.integer[Any]]
"""Tokens [cells]."""


def maze_source(options: Options) -> Source:
    """Mazes that are generated, or sampled from CSV files.

    The shortest path is at least as long as in the published mazes, in proportion to the cells.

    Raises:
        ConfigError: more augmentations are requested than there are, or more mazes.
        DataError: a CSV file is missing or damaged.
    """
    num_augment = NUM_SYMMETRIES - 1 if options.augment is None else options.augment
    if num_augment >= NUM_SYMMETRIES:
        raise OptionError("augment", num_augment, f"a maze has {NUM_SYMMETRIES - 1} symmetric ones")
    if options.csv:
        read = _from_csv(options)
        cells = read["train"][0].questions.shape[1]
        return pair_source(VOCAB_SIZE, cells, read, options.seed, num_augment, _group)
    side, num_train = options.size or SIDE, options.train or DEFAULT_COUNT
    least = max(2, LEAST_LENGTH * side**2 // SIDE**2)
    train = mazes(options.seed, Use.TRAIN, 0, side, least)
    test = mazes(options.seed, Use.TEST, num_train, side, least)
    splits = {
        "train": islice(train, num_train),
        "test": islice(test, options.test or DEFAULT_COUNT),
    }
    return pair_source(VOCAB_SIZE, side**2, splits, options.seed, num_augment, _group)


def _from_csv(options: Options) -> dict[str, list[Pairs]]:
    num_train = options.train or DEFAULT_COUNT

    def read(path: Path) -> Iterator[Pairs]:
        return read_mazes(path, options.rating or 0)

    def divide(pairs: Iterator[Pairs]) -> Iterator[tuple[str, Pairs]]:
        seen = set()
        for pair in pairs:
            form = canonical(_square(pair.questions[0]))
            if form not in seen:
                seen.add(form)
                yield "train" if len(seen) <= num_train else "test", pair

    splits = choose_pairs(options, read, divide)
    sizes = {pair.questions.shape[1] for pairs in splits.values() for pair in pairs}
    if len(sizes) > 1 or (options.size and sizes != {options.size**2}):
        raise ConfigError(
            f"--csv {options.csv}: mazes of {sorted(sizes)} cells: must be of one size, that of "
            "--size if it is given"
        )
    return splits


def _group(pair: Pairs, num_augment: int, generator: np.random.Generator) -> Iterator[Puzzle]:
    """The maze and different symmetric ones."""
    question, answer = _square(pair.questions[0]), _square(pair.answers[0])
    others = 1 + generator.permutation(NUM_SYMMETRIES - 1)[:num_augment]
    for number in [0, *others.tolist()]:
        inputs, labels = (transformed(grid, number).reshape(1, -1) for grid in (question, answer))
        yield Puzzle(0, inputs, labels)


def _square(tokens: Maze) -> Maze:
    side = math.isqrt(len(tokens))
    return tokens.reshape(side, side)


def to_tokens(text: str) -> Maze:
    """Tokens [len(text)] of a text; 0 for characters that no maze has."""
    table = np.zeros(256, np.uint8)
    for token, character in enumerate(CHARACTERS, start=1):
        table[ord(character)] = token
    return table[np.frombuffer(text.encode("latin1", "replace"), np.uint8)]


def to_text(tokens: Maze) -> str:
    """The text of tokens 1..5, in one line."""
    return "".join(CHARACTERS[token - 1] for token in tokens.reshape(-1).tolist())


def canonical(maze: Maze) -> bytes:
    """A form that a maze shares with its images under the eight symmetries only."""
    return min(transformed(maze, number).tobytes() for number in range(NUM_SYMMETRIES))


def distances(is_free: list[bool], side: int, start: int) -> list[int]:
    """Steps from a cell to each cell [side * side] through free cells; -1 for unreachable ones.

    A step goes to one of the four neighbours. Breadth-first search.
    """
    steps = [-1] * len(is_free)
    steps[start] = 0
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for other in neighbours(cell, side):
            if is_free[other] and steps[other] < 0:
                steps[other] = steps[cell] + 1
                queue.append(other)
    return steps


def neighbours(cell: int, side: int) -> list[int]:
    """The cells above, below, left and right of a cell."""
    column = cell % side
    cells = [cell - side] if cell >= side else []
    if cell < side * (side - 1):
        cells.append(cell + side)
    if column:
        cells.append(cell - 1)
    if column < side - 1:
        cells.append(cell + 1)
    return cells


def path_between(is_free: list[bool], side: int, start: int, goal: int) -> list[int]:
    """The cells of a shortest path from start to goal, both included; empty if there is none."""
    steps = distances(is_free, side, start)
    if steps[goal] < 0:
        return []
    path = [goal]
    while path[-1] != start:
        here = steps[path[-1]]
        path.append(next(cell for cell in neighbours(path[-1], side) if steps[cell] == here - 1))
    return path[::-1]


def solved(question: Tokens, side: int) -> Tokens | None:
    """A maze [cells] with a shortest path; None if no path leads from start to goal."""
    path = path_between((question != WALL).tolist(), side, *_ends(question))
    if not path:
        return None
    answer = np.array(question)
    answer[path[1:-1]] = PATH
    return answer


def path_lengths(question: Tokens, answer: Tokens, side: int) -> tuple[int, int]:
    """Steps of a shortest path from start to goal, and of one along an answer's path; or -1."""
    start, goal = _ends(question)
    is_path = (answer == PATH) | (question == GOAL)
    least, along = (
        distances(is_free.tolist(), side, start)[goal] for is_free in (question != WALL, is_path)
    )
    return least, along


def is_shortest_path(question: Tokens, answer: Tokens, side: int) -> bool:
    """Whether an answer is the question with a shortest path from start to goal.

    Args:
        question: a maze's tokens [side * side], with one start and one goal.
        answer: tokens [side * side].
        side: rows and columns.
    """
    is_path = answer == PATH
    if not np.array_equal(np.where(is_path, FREE, answer), question):
        return False
    least, along = path_lengths(question, answer, side)
    return least >= 0 and along == least and int(is_path.sum()) == max(least - 1, 0)


def _ends(question: Tokens) -> tuple[int, int]:
    """The cells of a maze's start and goal."""
    return int(np.argmax(question == START)), int(np.argmax(question == GOAL))


def mazes(
    seed: int, use: Use, num_others: int = 0, side: int = SIDE, least_length: int = LEAST_LENGTH
) -> Iterator[Pairs]:
    """An endless sequence of mazes, each as a pair of [1, cells]; no two of them are symmetric.

    Args:
        seed: seed of all draws.
        use: `TRAIN` or `TEST`. No maze of the test is one of the first `num_others` of training.
        num_others: number of training mazes to exclude; 0 for training itself.
        side: rows and columns, at least 5.
        least_length: steps of the path from start to goal, at least.

    Raises:
        ConfigError: the maze is too small, or no path is as long.
    """
    if side < 5 or least_length < 2:
        raise ConfigError(f"maze of side={side}, least_length={least_length}: at least 5 and 2")
    others = islice(mazes(seed, Use.TRAIN, 0, side, least_length), num_others)
    seen = {canonical(pair.questions.reshape(side, side)) for pair in others}
    number = failures = 0
    while failures < _MOST_FAILURES:
        question, answer = _drawn(keyed(seed, use, number), side, least_length)
        number += 1
        failures += 1
        form = canonical(question)
        if not (question == START).any() or form in seen:
            continue
        seen.add(form)
        failures = 0
        yield Pairs(question.reshape(1, -1), answer.reshape(1, -1))
    raise ConfigError(
        f"least_length={least_length}: no more mazes of {side}x{side} have such a path; take less"
    )


def _drawn(generator: np.random.Generator, side: int, least_length: int) -> tuple[Maze, Maze]:
    """A maze and its answer; without a start, if no path from the random cell is long enough."""
    maze = _carved(side, generator)
    is_free = maze.reshape(-1) == FREE
    start = int(generator.choice(np.flatnonzero(is_free)))
    steps = np.array(distances(is_free.tolist(), side, start))
    far = np.flatnonzero(steps >= least_length)
    if not len(far):
        return maze, maze
    goal = int(generator.choice(far))
    question, answer = maze.reshape(-1).copy(), maze.reshape(-1).copy()
    answer[path_between(is_free.tolist(), side, start, goal)] = PATH
    for grid in (question, answer):
        grid[[start, goal]] = START, GOAL
    return question.reshape(side, side), answer.reshape(side, side)


def _carved(side: int, generator: np.random.Generator) -> Maze:
    """A tree of corridors, carved depth first between rooms two cells apart.

    Each room has its own random order of directions. There are walls on all sides; where the side
    is even, one more wall lies on a random side.
    """
    rooms = (side - 1) // 2
    orders = generator.permuted(np.tile(np.arange(4), (rooms * rooms, 1)), axis=1).tolist()
    maze = np.full((side, side), WALL, np.uint8)
    below, right = (generator.integers(1 + (side - 1) % 2, size=2)).tolist()
    visited = [False] * (rooms * rooms)
    room = int(generator.integers(rooms * rooms))
    visited[room] = True
    trail = [room]
    while trail:
        row, column = divmod(trail[-1], rooms)
        cell = 1 + below + 2 * row, 1 + right + 2 * column
        maze[cell] = FREE
        directions = orders[trail[-1]]
        if not directions:
            trail.pop()
            continue
        down, across = ((-1, 0), (1, 0), (0, -1), (0, 1))[directions.pop()]
        other = (row + down) * rooms + column + across
        if 0 <= row + down < rooms and 0 <= column + across < rooms and not visited[other]:
            visited[other] = True
            maze[cell[0] + down, cell[1] + across] = FREE
            trail.append(other)
    return maze


def read_mazes(path: Path, least_rating: int = 0) -> Iterator[Pairs]:
    """The mazes of a CSV file, all of one size, each as a pair of [1, cells].

    Raises:
        DataError: as `read_rows`; or a text is no maze, or an answer no shortest path of its
            question; with its line. Or there is no maze at all.
    """
    cells = 0
    for row in read_rows(path, least_rating=least_rating):
        cells = cells or len(row.question)
        try:
            yield _checked(row, cells)
        except ValueError as error:
            raise DataError(f"{path}: line {row.line}: {error}") from None
    if not cells:
        raise DataError(f"{path}: holds no maze of rating {least_rating} or more")


def _checked(row: Row, cells: int) -> Pairs:
    """A row's maze. Raises `ValueError` if it is invalid."""
    side = math.isqrt(len(row.question))
    if side**2 != len(row.question) or not 3 <= side <= _MOST_SIDE:
        raise ValueError(
            f"question of {len(row.question)} characters: must be a square, of a side of 3 to "
            f"{_MOST_SIDE}"
        )
    if len(row.question) != cells or len(row.answer) != cells:
        raise ValueError(
            f"question of {len(row.question)}, answer of {len(row.answer)} characters: must be "
            f"{cells}, as in the first maze"
        )
    question, answer = to_tokens(row.question), to_tokens(row.answer)
    if not np.isin(question, (WALL, FREE, START, GOAL)).all():
        raise ValueError(f"question {shown(row.question)}: must be of '#', ' ', 'S' and 'G'")
    for token, name in ((START, "S"), (GOAL, "G")):
        if (question == token).sum() != 1:
            raise ValueError(f"question has {(question == token).sum()} {name}: must be one")
    is_path = answer == PATH
    if not np.array_equal(np.where(is_path, np.uint8(FREE), answer), question):
        raise ValueError("the answer is not the question with 'o' on free cells")
    least, along = path_lengths(question, answer, side)
    if least < 0 or along != least or is_path.sum() != least - 1:
        raise ValueError(
            f"the answer's {is_path.sum()} 'o' are no shortest path from S to G "
            f"({'there is none' if least < 0 else f'of {least} steps'})"
        )
    return Pairs(question[None], answer[None])
