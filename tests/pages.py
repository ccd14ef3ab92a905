"""The code that a reader types, on the pages of the documentation and in the README."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    "../README.md",
    *sorted(
        str(page.relative_to(DOCS))
        for folder in ("start", "tutorials", "how-to")
        for page in (DOCS / folder).glob("*.md")
        if "```sh" in page.read_text(encoding="utf-8")
    ),
]
"""Paths from `docs/`."""
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def docs_module(name: str) -> ModuleType:
    """A script of docs/, imported."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


class Block(NamedTuple):
    """A block of code: a file to write if it has a title, else a script to run."""

    language: str
    title: str
    code: str


def blocks(page: str) -> list[Block]:
    """What a reader of the page types; blocks below a `not run` comment are left out."""
    found = BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))
    wanted = [m for m in found if not m["skip"] and m["language"] in ("sh", "python")]
    return [Block(m["language"], m["title"] or "", m["code"]) for m in wanted]


def script(page: str) -> str:
    """All of a page as one shell script."""
    lines = ["set -eu"]
    for number, block in enumerate(blocks(page)):
        if block.language == "sh":
            lines.append(block.code)
            continue
        name = block.title or f"block{number}.py"
        lines.append(f"cat > {name} <<'END_OF_BLOCK'\n{block.code}END_OF_BLOCK")
        if not block.title:
            lines.append(f"python {name}")
    return "\n".join(lines)
