"""Fills in measured figures from docs/benchmarks/*.json, and lists them: `make docs-tables`.

A comment behind a number, or behind the link that it is in, names the cell that it is from:

    faster by 4.05<!-- host: MLP of 9,345 parameters, batch 64 > DDP (gloo) > speed -->

These are the file, the beginnings of a section's title, of a row and of a column's head. A row
begins with its first cells, joined by commas. Without a column it is a line below the table, `- `
left out. The number takes the first one there, or the one that `#2` behind it counts, in as many
decimals as it has. A figure that no benchmark measures names its command instead:

    in 1:51<!-- measured: lockstep train hrm -n 2 -->

A number with a unit that nobody measures, a limit, a setting or a definition, is marked as such;
one with neither comment fails a test (`unlinked`):

    at most 32 MiB<!-- given -->

README.md has names instead, as 24<!--torchft-->, which stand for such comments (`_NAMED`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks"
CLAIMS = BENCHMARKS / "claims.md"

_NUMBER = re.compile(r"(?<![\w.,])-?(?:\d[\d,]*)?\.?\d+(?![\d])")
_MARKER = re.compile(
    r"(?P<number>(?<![\w.,])-?(?:\d[\d,]*)?[.:]?\d+)"
    r"(?P<between>[^\d<\n]{0,12}?(?:\]\([^)\n]*\))?\**)"
    r"<!-- (?P<stem>[\w-]+): (?P<place>[^\n]*?) -->"
)
_NAMED: Mapping[str, str] = MappingProxyType(
    {
        "recovery-mpi": "recovery: A rank is killed > 3, mpi > next",
        "recovery-local": "recovery: A rank is killed > 4, local > next",
        "ddp-small": "host: MLP of 9,345 parameters, batch 64 a rank, 2 ranks > DDP (gloo) > speed",
        "plain": "host: MLP of 9,345 parameters, batch 64, 1 rank > plain loop, fused Adam > speed",
        "ddp-large": "host: MLP of 802,314 parameters > DDP (gloo) > speed",
        "dtensor": "parallel: Two ranks share two layers > Target DTensor / Lockstep, on MPI ≥ 1:",
        "fsdp-2": "slices: Peak > Target FSDP2 / Lockstep, time on 2 ranks ≥ 1:",
        "fsdp-4": "slices: Peak > FSDP2 / Lockstep, time on 4 ranks:",
        "gpt-2": "gpu: Steps > GPT-2 > ratio",
        "gpu-small": "gpu: Steps > perceptron, 9,345 > ratio",
        "torchft": "recovery: A rank is killed > 3 ranks: torchft takes",
        "circuit": "quantum: One circuit > 20 > lightning.qubit / Lockstep",
    }
)
"""What comments of a single name stand for: words of README.md are counted with its comments."""
_NAME = re.compile(r"<!--([\w-]+)-->")
_ANY_MARKER = re.compile(r"<!-- (?:measured: |[\w-]+: [^\n]*? > )[^\n]*?-->")
_LINKED_NUMBER = re.compile(r"\[\**[\d.,; ]+\**\]\([^)]*benchmarks/[\w-]+\.md[^)]*\)(?!<!--)")

_UNITS = (
    r"(?:[nµm]?s|min|h|(?:micro|milli)?seconds?|minutes?|hours?|days?|%|percent|[kKMGT]i?B|bytes|"
    r"times|[x×]|nats|bits|(?:steps|samples|sentences)(?:/s| a second| per second))"
)
_WITH_UNIT = re.compile(
    r"(?<![\w.,:/<=^-])[−-]?(?:\d[\d,]*(?:[.:]\d+)?|\.\d+)\]?\**\s?"
    rf"{_UNITS}(?![\w-])(?! \d)(?!\**<!-- given -->)"
)
_NO_PROSE = re.compile(
    r"^```.*?^```$|`[^`\n]*`|<!-- (?!given -->)[^\n]*?-->", re.DOTALL | re.MULTILINE
)
"""Blocks of code, code in a line, and comments."""


_HEAD = """\
# What was measured

Measured figures of these pages, the command that measures each, and its file. Those with a file are
filled in by `make docs-tables`, and a test fails where text and file differ.
"""


class Stale(Exception):
    """A comment names no cell; the message says which."""


class Claim(NamedTuple):
    """The figures of a line of text that one command has measured.

    Attributes:
        page: that has it.
        text: its line, without comments and links.
        numbers: the figures.
        source: name of the benchmark's file, or empty.
        command: that measures it.
    """

    page: Path
    text: str
    numbers: tuple[str, ...]
    source: str
    command: str


def pages() -> list[Path]:
    """README.md and the documentation, without what benchmarks write."""
    own = {BENCHMARKS / "index.md"}
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [README, *(p for p in found if p.parent != BENCHMARKS or p in own)]


def written(text: str) -> str:
    """A page with the figures that the benchmarks' files have.

    Raises:
        Stale: a comment names no cell, or is behind no number.
    """

    def figure(match: re.Match[str]) -> str:
        if match["stem"] == "measured":
            return match[0]
        new = _like(match["number"], cell(match["stem"], match["place"]))
        return new + match[0][len(match["number"]) :]

    text = _in_full(text)
    apart = _ANY_MARKER.search(_MARKER.sub("", text))
    if apart is not None:
        raise Stale(f"{apart[0]}: is not behind a number")
    text = _MARKER.sub(figure, text)
    for name, place in _NAMED.items():
        text = text.replace(f"<!-- {place} -->", f"<!--{name}-->")
    return text


def _in_full(text: str) -> str:
    """A page with names of places replaced by these."""
    return _NAME.sub(lambda match: f"<!-- {_NAMED.get(match[1], match[0])} -->", text)


def cell(stem: str, place: str) -> float:
    """The number at a place of a benchmark's file.

    Raises:
        Stale: there is none, or more than one.
    """
    where = f"<!-- {stem}: {place} -->"
    path = BENCHMARKS / f"{stem}.json"
    if not path.exists():
        raise Stale(f"{where}: there is no {path.name}")
    place, _, count = place.partition(" #")
    title, row, *column = place.split(" > ")
    sections = json.loads(path.read_text(encoding="utf-8"))["sections"]
    section = _only(where, sections, [[s["title"]] for s in sections], title)
    if "rows" not in section:
        raise Stale(f"{where}: {path.name} has no tables; run its benchmark again")
    if column:
        cells = _only(where, section["rows"], section["rows"], row)
        text = _only(where, cells, [[head] for head in section["header"]], column[0])
    else:
        lines = [line.removeprefix("- ") for line in section["verdicts"]]
        text = _only(where, lines, [[line] for line in lines], row).removeprefix(row)
    numbers = _NUMBER.findall(text)
    if len(numbers) < int(count or 1):
        raise Stale(f"{where}: has no such number: {text}")
    return float(numbers[int(count or 1) - 1].replace(",", ""))


def _only(where: str, values: Sequence[Any], names: Sequence[Sequence[str]], beginning: str) -> Any:
    """The value of which the first names are `beginning`, or begin so as those of no other."""
    count = beginning.count(", ") + 1
    firsts = [", ".join(of) for of in names]
    whole = [{", ".join(of[:n]).strip("*") for n in range(1, count + 1)} for of in names]
    found = [v for v, ends in zip(values, whole, strict=True) if beginning in ends]
    found = found or [
        v for v, f in zip(values, firsts, strict=True) if f.strip("*").startswith(beginning)
    ]
    if len(found) != 1:
        raise Stale(f"{where}: {len(found)} places, not one, begin with {beginning!r}")
    return found[0]


def _like(old: str, value: float) -> str:
    """A number in the form of another: its decimals, its commas, no 0 before the point."""
    decimals = len(old.partition(".")[2])
    new = f"{value:,.{decimals}f}" if "," in old or abs(value) < 1000 else f"{value:.{decimals}f}"
    return new.replace("0.", ".", 1) if old.lstrip("-").startswith(".") else new


def unmarked(text: str) -> list[str]:
    """Numbers that link to a benchmark without a comment that names their cell."""
    return _LINKED_NUMBER.findall(_in_full(text))


def unlinked(text: str) -> list[str]:
    """Numbers with a unit that have no comment: neither their place or command, nor `given`."""
    text = re.sub(r"(?<=\])\([^)\n]*\)", "", _in_full(text))
    return _WITH_UNIT.findall(_NO_PROSE.sub("·", text))


def claims() -> Iterator[Claim]:
    """All figures with a comment, page by page."""
    for page in pages():
        for line in _in_full(page.read_text(encoding="utf-8")).splitlines():
            by_source: dict[tuple[str, str], list[str]] = {}
            for match in _MARKER.finditer(line):
                source, command = match["stem"], match["place"]
                if source == "measured":
                    source = ""
                else:
                    facts = json.loads((BENCHMARKS / f"{source}.json").read_text("utf-8"))["facts"]
                    command = facts["command"].strip("`")
                by_source.setdefault((source, command), []).append(match["number"])
            for (source, command), numbers in by_source.items():
                yield Claim(page, _shown(line), tuple(numbers), source, command)


def _shown(line: str) -> str:
    """A line as a reader sees it, on a single cell of a table."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", line))
    return re.sub(r"\s*\|\s*", " · ", text.strip(" |")).replace("**", "").replace("`", "")


def claims_page() -> str:
    """The page of all claims."""
    rows = [("page", "figure", "in", "command", "file"), ("---",) * 5]
    for claim in claims():
        page = claim.page.relative_to(ROOT / "docs").as_posix() if claim.page != README else ""
        rows.append(
            (
                f"[{page}](../{page})" if page else "README.md",
                ", ".join(claim.numbers),
                claim.text,
                f"`{claim.command}`",
                f"[{claim.source}]({claim.source}.md)" if claim.source else "",
            )
        )
    return "\n".join([_HEAD, *(f"| {' | '.join(row)} |" for row in rows), ""])


def main() -> None:
    """Fill in all pages, and write the page of claims."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(written(text), encoding="utf-8")
    CLAIMS.write_text(claims_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
