"""Perfect mazes: one way from any cell to any other, so that the shortest path is the only one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.errors import ConfigError
from lockstep.recipes.hrm.data.draws import Use, keyed
from lockstep.recipes.hrm.data.maze.grid import (
    FREE,
    GOAL,
    PATH,
    SIDE,
    START,
    WALL,
    Maze,
    common_form,
    distances,
    path_between,
)
from lockstep.recipes.hrm.data.sample import Pairs

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
