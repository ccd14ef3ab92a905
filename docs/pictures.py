"""Draws the pictures of docs/architecture.md: `make docs-pictures`.

`house.svg` has the floors of the import contract in pyproject.toml, the rooms of the source tree,
and which floors each one imports, from the import graph. `step.svg`, `kill.svg` and `save.svg` have
the calls that the page lists, each in the column of the room that its file is in; a name that the
code does not have is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lockstep"
PAGE = ROOT / "docs" / "architecture.md"
FOLDER = ROOT / "docs" / "pictures"

WALKS = {
    "step": "One step, from sampler to optimizer",
    "kill": "One kill, from the loss to the next step",
    "save": "One checkpoint, from the step to the disk",
}
"""The section of the page whose listing is drawn, by picture."""

_ROOMS = (
    "launching", "engine/recovery", "engine/run", "engine", "engine/evaluation", "engine/audit",
    "engine/checkpoint", "engine/snapshot", "engine/step", "engine/optimizer", "engine/passes",
    "engine/tables", "engine/carry", "data", "parallel", "comm",
)  # fmt: skip
"""Columns of a walk, from the upper floors to the lower ones."""

_STYLE = """
  text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px }
  .name { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px }
  .title { font-weight: 600 } .note { font-size: 12px }
  path { fill: none; stroke-width: 1.5 } .back { stroke-dasharray: 4 3 }
  .page { fill: #ffffff } .band { fill: #f3f6fa }
  .title, .name { fill: #1f2328 } .note { fill: #59636e }
  .box { fill: #ffffff; stroke: #4a7ebb } .room { fill: #e4eefb }
  .call { stroke: #8aa8cc } .back { stroke: #c9823a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .band { fill: #161b22 }
    .title, .name { fill: #e6edf3 } .note { fill: #9da7b3 }
    .box { fill: #0d1117; stroke: #5b8fd6 } .room { fill: #1d3150 }
    .call { stroke: #46658f } .back { stroke: #d29a5b }
  }
"""

_CHAR, _NOTE_CHAR = 7.3, 6.3
"""About the width of a character of a name and of a note, in pixels."""
_NOTES_AT = 510
"""Where notes begin in the picture of the house, in pixels."""


class Call(NamedTuple):
    """A line of a listing.

    Attributes:
        depth: number of calls it is inside of.
        name: function or method, with its class.
        path: its file below the source folder.
        note: what the page says of it.
    """

    depth: int
    name: str
    path: str
    note: str

    @property
    def room(self) -> str:
        """The room, and for the engine the folder in it."""
        parts = self.path.split("/")
        return "/".join(parts[: 2 if parts[0] == "engine" and len(parts) > 2 else 1])


def pictures() -> dict[str, str]:
    """All pictures as SVG, by file name.

    Raises:
        ValueError: the page names a file, function or method that the code does not have.
    """
    walks = {f"{name}.svg": _walk(calls(section), section) for name, section in WALKS.items()}
    return {"house.svg": _house(), **walks}


# The house.


def _house() -> str:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    floors = [layer.split(" | ") for layer in contract["layers"]]
    graph = grimp.build_graph("lockstep", cache_dir=None)
    order = [name for floor in floors for name in floor]
    uses: dict[str, set[str]] = {name: set() for name in order}
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = [m.split(".")[1] if "." in m else "" for m in (module, other)]
            if all(name in uses for name in pair) and pair[0] != pair[1]:
                uses[pair[0]].add(pair[1])
    drawing = _Drawing(980)
    drawing.text(20, 30, "title", "Floors, and the rooms in them")
    drawing.text(_NOTES_AT, 30, "title", "Imports point down only")
    y = 46.0
    for number, floor in enumerate(floors):
        top, rows = y, []
        for name in floor:
            label = name if (SOURCE / name).is_dir() else f"{name}.py"
            used = [o for o in order if o in uses[name]]
            rows.append((label, _lines_of_rooms(label, _rooms(name)), used))
        height = 8 + 34 * sum(len(lines) for _, lines, _ in rows)
        drawing.band(10, top, 960, height, number)
        for label, lines_of_rooms, used in rows:
            y += 6
            drawing.box(20, y, label)
            middle = y + 17 * len(lines_of_rooms)
            for rooms in lines_of_rooms:
                x = 20 + _width(label) + 12
                for room in rooms:
                    x = drawing.room(x, y, room) + 6
                y += 34
            y -= 6
            note = "imports " + ", ".join(used) if used else "imports no other floor"
            lines = _broken(note, (960 - _NOTES_AT) / _NOTE_CHAR)
            for line, text in enumerate(lines):
                drawing.text(_NOTES_AT, middle + (line - (len(lines) - 1) / 2) * 14, "note", text)
        y = top + height + 4
    return drawing.svg(y + 6)


def _rooms(name: str) -> list[str]:
    """The folders in a package, in the order of their names."""
    folder = SOURCE / name
    inside = [p.parent.name for p in folder.glob("*/__init__.py")] if folder.is_dir() else []
    return sorted(inside)


def _lines_of_rooms(label: str, rooms: list[str]) -> list[list[str]]:
    """The rooms of a package in lines that end before the notes; at least one line."""
    first = 20 + _width(label) + 12
    lines, x = [list[str]()], first
    for room in rooms:
        if lines[-1] and x + _width(room) > _NOTES_AT - 10:
            lines.append([])
            x = first
        lines[-1].append(room)
        x += _width(room) + 6
    return lines


def _broken(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# A walk.


def calls(section: str) -> list[Call]:
    """The calls that the page lists in a section.

    Raises:
        ValueError: it names what is not in the code.
    """
    page = PAGE.read_text(encoding="utf-8")
    listing = page.split(f"## {section}\n", 1)[1].split("```\n", 2)[1]
    found: list[Call] = []
    homes: dict[str, str] = {}
    for line in listing.splitlines():
        match = re.fullmatch(r"( *)([\w.]+)(?:, …)?(?: {2,}(\S+\.py))?(?: {2,}(.*))?", line)
        if match is None or match[2].endswith(".py"):
            continue  # a second file of the call above
        depth, name, note = len(match[1]) // 2, match[2], match[4] or ""
        owner = name.partition(".")[0]
        path = match[3] or homes.get(owner, "")
        homes.setdefault(owner, path)
        if not _is_defined(name, path):
            raise ValueError(f"{PAGE.name}: {section}: src/lockstep/{path} has no {name}")
        found.append(Call(depth, name, path, note.rstrip(":;")))
    return found


def _is_defined(name: str, path: str) -> bool:
    file = SOURCE / path
    if not path or not file.is_file():
        return False
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    wanted = name.rpartition(".")[2]
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == wanted:
            return True
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and node.attr == wanted:
            return True
    return False


def _walk(listed: list[Call], title: str) -> str:
    rooms = [room for room in _ROOMS if any(call.room == room for call in listed)]
    unknown = {call.room for call in listed} - set(rooms)
    if unknown:
        raise ValueError(f"{PAGE.name}: {title}: no column for {', '.join(sorted(unknown))}")
    stride, top, row = min(126.0, 880.0 / len(rooms)), 78.0, 34.0
    bottom = top + row * len(listed)
    drawing = _Drawing(1240)
    drawing.text(20, 28, "title", title)
    for number, room in enumerate(rooms):
        drawing.band(10 + stride * number, 40, stride, bottom - 34, number)
        for line, part in enumerate(room.replace("/", "/ ").split(" ")):
            drawing.text(18 + stride * number, 56 + 14 * line, "note", part)
    places: list[tuple[Call, float, float]] = []
    notes_at: list[float] = []
    for number, call in enumerate(listed):
        callers = [p for p in places if p[0].depth < call.depth]
        note_x = 0.0
        x, y = 20 + stride * rooms.index(call.room), top + 4 + row * number
        if callers:
            caller, caller_x, caller_y = callers[-1]
            if caller.room == call.room:
                x = caller_x + 16
            elif x < caller_x:
                note_x = caller_x + 16  # right of the line that comes back
            drawing.line(caller_x, caller_y, x, y, len(call.name))
        places.append((call, x, y))
        notes_at.append(note_x)
    for (call, x, y), note_x in zip(places, notes_at, strict=True):
        right = drawing.box(x, y, call.name)
        drawing.text(max(right + 10, note_x), y + 17, "note", call.note)
    return drawing.svg(bottom + 14)


def _width(name: str) -> float:
    """The width of a box with a name, in pixels."""
    return 16 + _CHAR * len(name)


@dataclass
class _Drawing:
    """The elements of a picture.

    Attributes:
        width: width of the picture in pixels.
    """

    width: float

    def __post_init__(self) -> None:
        self._elements: list[str] = []

    def text(self, x: float, y: float, kind: str, text: str) -> None:
        """Text that begins at (x, y), its baseline."""
        self._elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def band(self, x: float, y: float, width: float, height: float, number: int) -> None:
        """A background; every second one differs from the page."""
        kind = "page" if number % 2 else "band"
        self._rectangle(kind, x, y, width, height)

    def _rectangle(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        size = f'width="{width:g}" height="{height:g}"'
        self._elements.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size} rx="5"/>')

    def box(self, x: float, y: float, name: str) -> float:
        """A box with a name; its right edge."""
        return self._labelled("box", x, y, name)

    def room(self, x: float, y: float, name: str) -> float:
        """A room inside a package; its right edge."""
        return self._labelled("room", x, y, name)

    def _labelled(self, kind: str, x: float, y: float, name: str) -> float:
        width = _width(name)
        self._rectangle(kind, x, y, width, 26)
        self.text(x + 8, y + 17, "name", name)
        return x + width

    def line(self, x: float, y: float, to_x: float, to_y: float, num_chars: int) -> None:
        """From a caller's box to the box of what it calls; dashed if that is further up."""
        kind, end = "call", to_x
        if to_x < x:
            kind, end = "back", to_x + 16 + _CHAR * num_chars
        self._elements.append(
            f'<path class="{kind}" d="M{x + 8:g} {y + 26:g} V{to_y + 13:g} H{end:g}"/>'
        )

    def svg(self, height: float) -> str:
        """The picture."""
        size = f'width="{self.width:g}" height="{height:g}"'
        box = f'viewBox="0 0 {self.width:g} {height:g}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>',
                f"<style>{_STYLE}</style>",
                f'<rect class="page" {size}/>',
                *self._elements,
                "</svg>\n",
            ]
        )


def stale() -> Iterator[str]:
    """Names of the pictures that are not as the code is now."""
    for name, picture in pictures().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != picture:
            yield name


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")
