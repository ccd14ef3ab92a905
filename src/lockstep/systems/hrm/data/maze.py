"""Mazes: a path through each, generated or read from the public CSV.

A maze is a square of `#` (wall), ` ` (free), one `S` (start) and one `G` (goal); the answer has `o`
on the free cells of the shortest path between them. Tokens are 1..5 in the order of `CHARACTERS`,
0 is padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data.arrays import NUM_SYMMETRIES, Use, keyed, transformed
from lockstep.systems.hrm.data.csv_rows import DEFAULT_COUNT, Pairs, Row, chosen, read_rows
from lockstep.systems.hrm.data.request import (
    Group,
    NamesIdentifier,
    OptionError,
    Options,
    Source,
    asked,
)
from lockstep.systems.hrm.data.writer import Puzzle

CHARACTERS = "# SGo"
VOCAB_SIZE = len(CHARACTERS) + 1
SIDE = 30
"""Rows and columns of the published mazes."""

WALL, FREE, START, GOAL, PATH = range(1, VOCAB_SIZE)

Maze = npt.NDArray[np.uint8]
"""Tokens [side, side]."""


def to_tokens(text: str) -> Maze:
    """Tokens [len(text)] of a text; 0 for characters that no maze has."""
    table = np.zeros(256, np.uint8)
    for token, character in enumerate(CHARACTERS, start=1):
        table[ord(character)] = token
    return table[np.frombuffer(text.encode("latin1", "replace"), np.uint8)]


def to_text(tokens: Maze) -> str:
    """The text of tokens 1..5, in one line."""
    return "".join(CHARACTERS[token - 1] for token in tokens.reshape(-1).tolist())


def distances(is_free: list[bool], side: int, start: int) -> list[int]:
    """Steps from a cell to each cell [side * side], through free cells; -1 if there is no way.

    A step goes to one of the four cells beside.
    """
    steps = [-1] * len(is_free)
    steps[start] = 0
    front = [start]
    while front:
        ahead = []
        for cell in front:
            for other in beside(cell, side):
                if is_free[other] and steps[other] < 0:
                    steps[other] = steps[cell] + 1
                    ahead.append(other)
        front = ahead
    return steps


def beside(cell: int, side: int) -> list[int]:
    """The cells above, below, left and right of a cell."""
    column = cell % side
    near = [cell - side] if cell >= side else []
    if cell < side * (side - 1):
        near.append(cell + side)
    if column:
        near.append(cell - 1)
    if column < side - 1:
        near.append(cell + 1)
    return near


def path_between(is_free: list[bool], side: int, start: int, goal: int) -> list[int]:
    """The cells of a shortest path from start to goal, both included; empty if there is none."""
    steps = distances(is_free, side, start)
    if steps[goal] < 0:
        return []
    path = [goal]
    while path[-1] != start:
        here = steps[path[-1]]
        path.append(next(cell for cell in beside(path[-1], side) if steps[cell] == here - 1))
    return path[::-1]


def common_form(maze: Maze) -> bytes:
    """What a maze has in common with those that the eight symmetries make of it."""
    return min(transformed(maze, number).tobytes() for number in range(NUM_SYMMETRIES))


LEAST_LENGTH = 110
"""Steps of the shortest path, at least, as in the published mazes."""

_MOST_FAILURES = 200


def mazes(
    seed: int, use: Use, num_others: int = 0, side: int = SIDE, least_length: int = LEAST_LENGTH
) -> Iterator[Pairs]:
    """Mazes without end, all different up to the eight symmetries; a pair of [1, cells] for each.

    Args:
        seed: seed of all draws.
        use: `TRAIN` or `TEST`. No maze of the test is one of the first `num_others` of training.
        num_others: number of training mazes to stay away from; 0 for training itself.
        side: rows and columns, at least 5.
        least_length: steps of the path from start to goal, at least.

    Raises:
        ConfigError: the maze is too small, or no path is as long.
    """
    if side < 5 or least_length < 2:
        raise ConfigError(f"maze of side={side}, least_length={least_length}: at least 5 and 2")
    taken = set()
    if num_others:
        others = mazes(seed, Use.TRAIN, 0, side, least_length)
        taken = {common_form(next(others).questions.reshape(side, side)) for _ in range(num_others)}
    number = failures = 0
    while failures < _MOST_FAILURES:
        question, answer = _drawn(keyed(seed, use, number), side, least_length)
        number += 1
        failures += 1
        form = common_form(question)
        if not (question == START).any() or form in taken:
            continue
        taken.add(form)
        failures = 0
        yield Pairs(question.reshape(1, -1), answer.reshape(1, -1))
    raise ConfigError(
        f"least_length={least_length}: no more mazes of {side}x{side} have such a path; take less"
    )


def _drawn(generator: np.random.Generator, side: int, least_length: int) -> tuple[Maze, Maze]:
    """A maze and its answer; without a start, if no path from the cell drawn is long enough."""
    maze = _carved(side, generator)
    free = np.flatnonzero(maze.reshape(-1) == FREE)
    start = int(generator.choice(free))
    is_free = (maze.reshape(-1) == FREE).tolist()
    steps = np.array(distances(is_free, side, start))
    far = np.flatnonzero(steps >= least_length)
    if not len(far):
        return maze, maze
    goal = int(generator.choice(far))
    question, answer = maze.reshape(-1).copy(), maze.reshape(-1).copy()
    answer[path_between(is_free, side, start, goal)] = PATH
    for grid in (question, answer):
        grid[[start, goal]] = START, GOAL
    return question.reshape(side, side), answer.reshape(side, side)


def _carved(side: int, generator: np.random.Generator) -> Maze:
    """A tree of corridors, carved depth first between rooms two cells apart.

    Each room's directions are in an order drawn for it. Walls on all sides; where the side is even,
    one more of them lies on a side that is drawn.
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
        place = 1 + below + 2 * row, 1 + right + 2 * column
        maze[place] = FREE
        directions = orders[trail[-1]]
        if not directions:
            trail.pop()
            continue
        down, across = ((-1, 0), (1, 0), (0, -1), (0, 1))[directions.pop()]
        other = (row + down) * rooms + column + across
        if 0 <= row + down < rooms and 0 <= column + across < rooms and not visited[other]:
            visited[other] = True
            maze[place[0] + down, place[1] + across] = FREE
            trail.append(other)
    return maze


_MOST_SIDE = 64


def read_mazes(path: Path, least_rating: int = 0) -> Iterator[Pairs]:
    """The mazes of a CSV file, all of one size; a pair of [1, cells] for each.

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
    """A row's maze. Raises `ValueError` for what is wrong with it."""
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
    start, goal = int(np.argmax(question == START)), int(np.argmax(question == GOAL))
    least = distances((question != WALL).tolist(), side, start)[goal]
    along = distances((is_path | (question == GOAL)).tolist(), side, start)[goal]
    if least < 0 or along != least or is_path.sum() != least - 1:
        raise ValueError(
            f"the answer's {is_path.sum()} 'o' are no shortest path from S to G "
            f"({'there is none' if least < 0 else f'of {least} steps'})"
        )
    return Pairs(question[None], answer[None])


def maze_source(options: Options) -> Source:
    """Mazes that are made, or chosen from CSV files.

    The least length of the path is that of the published mazes, in proportion to the cells.

    Raises:
        ConfigError: more augmentations are asked for than there are, or more mazes.
        DataError: a CSV file is missing or damaged.
    """
    num_augment = asked(options.augment, NUM_SYMMETRIES - 1)
    if num_augment >= NUM_SYMMETRIES:
        raise OptionError("augment", num_augment, f"a maze has {NUM_SYMMETRIES - 1} symmetric ones")
    found: Mapping[str, Iterable[Pairs]]
    if options.csv:
        lists = _from_csv(options)
        found, total = lists, sum(map(len, lists.values()))
        cells = lists["train"][0].questions.shape[1]
    else:
        side = asked(options.size, SIDE)
        found, total = _made(side, options)
        cells = side**2

    def groups(_: NamesIdentifier) -> Iterator[Group]:
        for split, pairs in found.items():
            for number, pair in enumerate(pairs):
                generator = keyed(options.seed, Use.AUGMENT, number)
                count = num_augment if split == "train" else 0
                yield split, list(_group(pair, count, generator))

    return Source(VOCAB_SIZE, cells, total, groups)


def _made(side: int, options: Options) -> tuple[dict[str, Iterable[Pairs]], int]:
    train = asked(options.train, DEFAULT_COUNT)
    test = asked(options.test, DEFAULT_COUNT)
    least = max(2, LEAST_LENGTH * side**2 // SIDE**2)
    return {
        "train": islice(mazes(options.seed, Use.TRAIN, 0, side, least), train),
        "test": islice(mazes(options.seed, Use.TEST, train, side, least), test),
    }, train + test


def _from_csv(options: Options) -> dict[str, list[Pairs]]:
    def read(path: Path) -> Iterator[Pairs]:
        return read_mazes(path, asked(options.rating, 0))

    def divide(pairs: Iterator[Pairs]) -> Iterator[tuple[str, Pairs]]:
        seen = set()
        for pair in pairs:
            form = common_form(_square(pair.questions[0]))
            if form not in seen:
                seen.add(form)
                yield "train" if len(seen) <= num_train else "test", pair

    num_train = asked(options.train, DEFAULT_COUNT)
    found = chosen(options, read, divide)
    sizes = {pair.questions.shape[1] for pairs in found.values() for pair in pairs}
    if len(sizes) > 1 or (options.size and sizes != {options.size**2}):
        raise ConfigError(
            f"--csv {options.csv}: mazes of {sorted(sizes)} cells: must be of one size, that of "
            "--size if it is given"
        )
    return found


def _group(pair: Pairs, num_augment: int, generator: np.random.Generator) -> Iterator[Puzzle]:
    """The maze and different symmetric ones; none has an identifier of its own."""
    question, answer = _square(pair.questions[0]), _square(pair.answers[0])
    others = 1 + generator.permutation(NUM_SYMMETRIES - 1)[:num_augment]
    for number in [0, *others.tolist()]:
        inputs, labels = (transformed(grid, number).reshape(1, -1) for grid in (question, answer))
        yield Puzzle(0, inputs, labels)


def _square(tokens: Maze) -> Maze:
    side = round(len(tokens) ** 0.5)
    return tokens.reshape(side, side)
