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


@dataclass(frozen=True)
class Image:
    """A picture that is there already.

    Attributes:
        name: of its file.
        title: what it shows.
        png: content of a PNG file.
    """

    name: str
    title: str
    png: bytes


Block: TypeAlias = "Heading | Paragraph | Listing | Grid | Picture | Image"
