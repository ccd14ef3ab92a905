"""A report as HTML that loads nothing, and as Markdown with pictures beside it."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.config.files import replacing, replacing_binary
from lockstep.errors import DataError, file_errors
from lockstep.observe.text import printable


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
        name: name of its files.
        title: what it shows.
        figure: `matplotlib.figure.Figure`.
    """

    name: str
    title: str
    figure: Any


@dataclass(frozen=True)
class Image:
    """A picture that a run has logged.

    Attributes:
        name: name of its file.
        title: what it shows.
        png: content of a PNG file.
    """

    name: str
    title: str
    png: bytes


Block: TypeAlias = "Heading | Paragraph | Listing | Grid | Picture | Image"


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_DPI = 150
_ESCAPED = re.compile(r"([\\`*_{}\[\]<>|#])")


def as_html(blocks: Iterable[Block]) -> str:
    """The page, which loads nothing and runs nothing."""
    known = list(blocks)
    title = next((b.text for b in known if isinstance(b, Heading)), "report")
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_shown(title)}</title>",
        f"<style>\n{style}</style></head>",
        "<body>",
        *(line for block in known for line in _html(block)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _html(block: Block) -> Iterator[str]:
    match block:
        case Heading(text, level):
            yield f"<h{level}>{_shown(text)}</h{level}>"
        case Paragraph(text):
            yield f"<p>{_shown(text)}</p>"
        case Listing(lines, summary):
            content = f"<pre>{_shown(chr(10).join(lines))}</pre>"
            if summary:
                content = f"<details><summary>{_shown(summary)}</summary>{content}</details>"
            yield content
        case Grid(headers, rows):
            yield '<div class="wide"><table>'
            if any(headers):
                yield "<tr>" + "".join(f"<th>{_shown(h)}</th>" for h in headers) + "</tr>"
            for first, *rest in rows:
                cells = "".join(f"<td>{_shown(cell)}</td>" for cell in rest)
                yield f'<tr><th scope="row">{_shown(first)}</th>{cells}</tr>'
            yield "</table></div>"
        case Picture(_, title, _):
            yield f"<h2>{_shown(title)}</h2>"
            drawn = rendered(block, "svg").decode()
            yield f'<figure role="img" aria-label="{_shown(title)}">'
            yield drawn[drawn.index("<svg") :]  # what is before makes a file of it
            yield "</figure>"
        case Image(_, title, png):
            source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            yield f'<figure><img alt="{_shown(title)}" src="{source}">'
            yield f"<figcaption>{_shown(title)}</figcaption></figure>"


def as_markdown(blocks: Iterable[Block], pictures: str) -> str:
    """The page as Markdown.

    Args:
        blocks: blocks of the report.
        pictures: folder of the pictures, as links name it.
    """
    return "\n".join(line for block in blocks for line in (*_markdown(block, pictures), ""))


def _markdown(block: Block, pictures: str) -> Iterator[str]:
    match block:
        case Heading(text, level):
            yield f"{'#' * level} {_marked(text)}"
        case Paragraph(text):
            yield _marked(text)
        case Listing(lines, _):
            yield from (
                "```text",
                *(printable(line).replace("```", "'''") for line in lines),
                "```",
            )
        case Grid(headers, rows):
            yield f"| {' | '.join(map(_marked, headers))} |"
            yield f"|{'---|' * len(headers)}"
            for row in rows:
                yield f"| {' | '.join(map(_marked, row))} |"
        case Picture(name, title, _):
            yield from (f"## {_marked(title)}", "", f"![{_marked(title)}](<{pictures}/{name}.svg>)")
        case Image(name, title, _):
            yield f"![{_marked(title)}](<{pictures}/{name}.png>)"


def write_text(path: Path, text: str) -> None:
    """Write a page, completely or not at all.

    Raises:
        DataError: it cannot be written.
    """
    with file_errors(DataError, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)


def write_pictures(blocks: Iterable[Block], folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write the pictures of a report.

    Args:
        blocks: blocks of the report.
        folder: folder of the files; created if it does not exist.
        kinds: `svg`, `png`: formats of the figures; images are PNG files.

    Raises:
        DataError: one cannot be written.
    """
    files: dict[Path, bytes] = {}
    for block in blocks:
        if isinstance(block, Picture):
            for kind in kinds:
                files[folder / f"{block.name}.{kind}"] = rendered(block, kind)
        elif isinstance(block, Image):
            files[folder / f"{block.name}.png"] = block.png
    with file_errors(DataError, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            with replacing_binary(path) as file:
                file.write(content)
    return list(files)


def rendered(picture: Picture, kind: str) -> bytes:
    """A picture as a file, `svg` or `png`: the same bytes every time."""
    import matplotlib as mpl

    file = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    # The salt makes ids inside an SVG, which must differ from those of others on the page.
    with mpl.rc_context({"svg.hashsalt": picture.name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font may lack a character
        picture.figure.savefig(file, format=kind, dpi=_DPI, metadata=metadata)
    return file.getvalue()


def _shown(text: str) -> str:
    return escape(printable(text))


def _marked(text: str) -> str:
    """Text that Markdown shows as it is, in a cell too."""
    return _ESCAPED.sub(r"\\\1", printable(text).replace("\n", " "))
