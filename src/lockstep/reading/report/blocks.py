"""What a report is made of, whether it becomes HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's own."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Lines that keep their spaces, folded away in HTML if `summary` is given."""

    lines: Sequence[str]
    summary: str = ""


@dataclass(frozen=True)
class Grid:
    """A table; cells are plain text, and headers may be empty."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure of matplotlib.

    Attributes:
        name: of its files.
        title: what it shows.
        figure: `matplotlib.figure.Figure`.
    """

    name: str
    title: str
    figure: Any


Block: TypeAlias = "Heading | Paragraph | Listing | Grid | Picture"
