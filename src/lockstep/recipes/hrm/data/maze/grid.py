"""Mazes as texts and tokens, and their shortest paths.

A maze is a square of `#` (wall), ` ` (free), one `S` (start) and one `G` (goal); the answer has `o`
on the free cells of the shortest path between them. Tokens are 1..5 in the order of `CHARACTERS`,
0 is padding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.data.dihedral import NUM_SYMMETRIES, transformed

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
