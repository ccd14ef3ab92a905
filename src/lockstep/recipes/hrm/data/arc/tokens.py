"""Grids as 900 tokens: 0 is padding, 1 the end of the grid, 2..11 the ten colours.

A grid lies in a field of 30x30. The row below it and the column right of it are ends, as far as
they are in the field.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Grid = npt.NDArray[np.uint8]
"""Colours 0..9 [rows, columns]."""

SIDE = 30
"""Rows and columns of the field, and at most of a grid."""

SEQ_LEN = SIDE**2
NUM_COLOURS = 10
PAD, END, FIRST_COLOUR = 0, 1, 2
VOCAB_SIZE = FIRST_COLOUR + NUM_COLOURS


def to_tokens(grid: Grid, below: int = 0, right: int = 0) -> Grid:
    """The tokens [900] of a grid that lies so many cells below and right of the field's corner."""
    field = np.full((SIDE, SIDE), PAD, np.uint8)
    last_row, last_column = below + grid.shape[0], right + grid.shape[1]
    assert max(last_row, last_column) <= SIDE
    field[below:last_row, right:last_column] = grid + np.uint8(FIRST_COLOUR)
    if last_row < SIDE:
        field[last_row, right:last_column] = END
    if last_column < SIDE:
        field[below:last_row, last_column] = END
    return field.reshape(-1)


def to_grid(tokens: npt.NDArray[np.integer[Any]]) -> Grid:
    """The grid of tokens [900]: the largest rectangle of colours at the field's corner.

    A model may answer anything. So the grid may be empty, [0, 0]; of rectangles of one size the one
    with fewest rows is taken.
    """
    field = np.asarray(tokens).reshape(SIDE, SIDE)
    is_colour = (field >= FIRST_COLOUR) & (field < VOCAB_SIZE)
    # Columns that a rectangle of the first n rows can have, for n = 1..30.
    widths = np.logical_and.accumulate(is_colour, axis=1).sum(axis=1)
    widths = np.minimum.accumulate(widths)
    rows = int(np.argmax(widths * np.arange(1, SIDE + 1))) + 1
    columns = int(widths[rows - 1])
    if not columns:
        return np.empty((0, 0), np.uint8)
    return (field[:rows, :columns] - FIRST_COLOUR).astype(np.uint8)
