"""The size and the words of the house: `python -m tests.house`; limits are in `pyproject.toml`.

Prints modules and lines of code of each room, the smallest and the longest files, comments in the
hot path, and words that are not the house's (`tests/test_terms.py`). Ends with code 1 if a limit is
passed.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests import test_terms

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lockstep"

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes:
        path: path below `src/lockstep`.
        code: lines without blanks, comments and docstrings.
        comments: lines that are comments alone, or have one behind their code.
    """

    path: Path
    code: int
    comments: int


def module(path: Path) -> Module:
    """A file, counted."""
    text = path.read_text(encoding="utf-8")
    docs = {line for first, last in _docstrings(ast.parse(text)) for line in range(first, last + 1)}
    lines: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
        comments += token.type == tokenize.COMMENT and not _is_directive(token.string)
    return Module(path.relative_to(SOURCE), len(lines - docs), comments)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """The lines of texts that stand for themselves, behind constants too."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.end_lineno or value.lineno


def _is_directive(comment: str) -> bool:
    return re.match(r"#\s*(type:|noqa|fmt:|pragma)", comment) is not None


def modules() -> list[Module]:
    """All files of the package, by path."""
    return [module(path) for path in sorted(SOURCE.rglob("*.py"))]


def limits() -> dict[str, Any]:
    """`[tool.lockstep.house]` of `pyproject.toml`."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["tool"]["lockstep"]["house"]
    return found


def problems() -> list[str]:
    """Which limits are passed, in words."""
    limit, files = limits(), modules()
    per_100 = _comments_per_100(files, limit["hot_path"])
    rooms = {p.stem for p in SOURCE.iterdir() if p.name not in ("__pycache__", "py.typed")}
    counted = {
        "modules": len(files),
        "lines_of_code": sum(m.code for m in files),
        "longest_file": max(_num_lines(m) for m in files),
        "readme_words": len(_seen(ROOT / "README.md").split()),
        "docs_words": _docs_words(),
    }
    found = [
        f"{name}: {counted[name]:,}, more than {most:,}"
        for name, most in limit["most"].items()
        if counted[name] > most
    ]
    if per_100 < limit["least_comments_per_100"]:
        found.append(f"comments in 100 lines of the hot path: {per_100:.1f}")
    if unknown := rooms - set(limit["rooms"]):
        found.append(f"rooms that docs/architecture.md does not have: {', '.join(sorted(unknown))}")
    return found


def _comments_per_100(files: list[Module], hot_path: list[str]) -> float:
    """Comments in 100 lines of code of the hot path."""
    hot = [m for m in files if any(m.path.is_relative_to(path) for path in hot_path)]
    return 100 * sum(m.comments for m in hot) / max(1, sum(m.code for m in hot))


def _num_lines(found: Module) -> int:
    return (SOURCE / found.path).read_text(encoding="utf-8").count("\n")


def _docs_words() -> int:
    """Words of the documentation, without the bars of tables and the pages that are generated."""
    docs = ROOT / "docs"
    skipped = {docs / "reference/command-line.md", *docs.glob("benchmarks/*.md")}
    skipped.remove(docs / "benchmarks/index.md")
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p not in skipped]
    tokens = (token for page in pages for token in _seen(page).split())
    return sum(any(map(str.isalnum, token)) for token in tokens)


def _seen(page: Path) -> str:
    """A page without its comments."""
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def report() -> Iterator[str]:
    """The house in numbers."""
    files = modules()
    rooms: Counter[str] = Counter()
    comments: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for found in files:
        parts = found.path.parts
        room = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        rooms[room] += found.code
        comments[room] += found.comments
        counts[room] += 1
    yield f"{'room':<28}{'files':>7}{'code':>8}{'comments in 100':>17}"
    for room in sorted(rooms):
        share = 100 * comments[room] / max(1, rooms[room])
        yield f"{room:<28}{counts[room]:>7}{rooms[room]:>8,}{share:>17.1f}"
    yield f"{'all':<28}{len(files):>7}{sum(rooms.values()):>8,}"
    small = sorted((m for m in files if 0 < m.code < 60), key=lambda m: m.code)
    yield f"{len(small)} files under 60 lines of code, the smallest of them:"
    for found in small[:15]:
        yield f"  {found.code:>4}  {found.path}"
    yield "the longest files:"
    for found in sorted(files, key=_num_lines, reverse=True)[:10]:
        yield f"  {_num_lines(found):>4}  {found.path}"
    per_100 = _comments_per_100(files, limits()["hot_path"])
    yield f"comments in 100 lines of the hot path: {per_100:.1f}"
    yield f"words: README {len(_seen(ROOT / 'README.md').split()):,}, docs {_docs_words():,}"


def main() -> int:
    """Print the house and the limits that are passed."""
    for line in report():
        print(line)
    found = problems()
    found += [p for path in test_terms.files() for p in test_terms.problems(path)]
    for problem in found:
        print(f"limit: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
