"""Text in the room that there is: what fits a line, and how a long one is broken."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rich.cells import cell_len


class Item(NamedTuple):
    """A part of a line.

    Attributes:
        importance: 0 for what is left out last; the greater, the earlier it goes.
        text: what is shown.
    """

    importance: int
    text: str


def kept(items: Iterable[Item], width: float) -> list[Item]:
    """The items that fit a line, in their order; the least important are left out.

    The most important one stays, however long it is.

    Args:
        items: parts of the line; those without text are passed over.
        width: columns that there are, for items with two blanks between them.
    """
    left = [item for item in items if item.text]
    while len(left) > 1 and cell_len(_joined(left)) > width:
        # Of equals the last one goes.
        left.pop(max(range(len(left)), key=lambda place: (left[place].importance, place)))
    return left


def fitted(items: Iterable[Item], width: float) -> str:
    """The items that fit, in one line; as `kept`."""
    return _joined(kept(items, width))


def _joined(items: Iterable[Item]) -> str:
    return "  ".join(item.text for item in items)


def row(name: str, value: str, width: float) -> str:
    """A row of a block: the name, and the value in a column beside it.

    A digest or path that is too long for that column begins at the left of a line of its own.
    """
    room = width - _COLUMN
    if max(map(cell_len, value.split(" "))) > room:
        return f"{name}\n{value}"
    return f"{name:<{_COLUMN - 1}} " + wrapped(value, room, 0).replace("\n", "\n" + " " * _COLUMN)


_COLUMN = 12


def wrapped(line: str, width: float, indent: int = 2) -> str:
    """A line in as many as it takes to fit a terminal.

    It is broken between items (two blanks), else between words; never inside a word, so that
    numbers, digests and paths stay whole, even those that are too long for a line.

    Args:
        line: text without line breaks.
        width: columns of the terminal; infinite where lines may be of any length.
        indent: blanks before each line but the first.
    """
    if cell_len(line) <= width or line[:1].isspace():
        return line
    room = width - indent
    lines: list[str] = []
    for item in line.split("  "):
        words = [item] if cell_len(item) <= room else item.split(" ")
        for number, word in enumerate(words):
            gap = " " if number else "  "
            limit = width if len(lines) == 1 else room
            if lines and cell_len(lines[-1] + gap + word) <= limit:
                lines[-1] += gap + word
            else:
                lines.append(word)
    return ("\n" + " " * indent).join(lines)


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor or change a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
