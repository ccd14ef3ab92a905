"""From what was measured to a Markdown page."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Spread


@dataclass
class Section:
    """One case on the page.

    Attributes:
        title: its heading.
        text: what was done.
        header: of the table.
        rows: of the table.
        verdicts: a line for each target.
        raw: everything measured, for the JSON file.
    """

    title: str
    text: str
    header: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def at_least(self, what: str, value: Spread, target: float, best: Spread | None = None) -> None:
        """Judge a ratio that is to reach `target`.

        Args:
            what: the ratio, by words.
            value: the ratio.
            target: the least that it is to be.
            best: what it would be if only torch's own work took time, where that was measured.
        """
        self._judge(f"{what} ≥ {target:g}", f"{ratio(value)}", value.median >= target)
        if best is not None:
            self.verdicts.append(f"- Torch alone, without engine and exchange: {ratio(best)}.")

    def at_most(self, what: str, shown: str, met: bool) -> None:
        """Judge something that is to stay below a bound."""
        self._judge(what, shown, met)

    def markdown(self) -> str:
        """As Markdown."""
        table = [self.header, ["---"] * len(self.header), *self.rows]
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        return "\n".join([f"## {self.title}", "", self.text, "", *lines, "", *self.verdicts, ""])

    def saved(self) -> dict[str, Any]:
        """What the JSON file beside the page has of it."""
        keys = ("title", "header", "rows", "verdicts", "raw")
        return {key: getattr(self, key) for key in keys}

    def _judge(self, target: str, found: str, met: bool) -> None:
        self.verdicts.append(f"- Target {target}: {found} → **{'met' if met else 'missed'}**")


_SHOWN = ("torch", "GPU", "CUDA")
"""Facts at the head of a page; the file with raw numbers has all of them."""


def page(
    title: str,
    facts: Mapping[str, str],
    sections: Sequence[Section],
    method: str = "",
) -> str:
    """The whole page.

    Args:
        title: its heading.
        facts: what the numbers depend on, by name.
        sections: of the page.
        method: how was measured, and how to read the cells, where `docs/benchmarks/index.md` does
            not say it.
    """
    with_what = "".join(f", {name} {facts[name]}" for name in _SHOWN if name in facts)
    measured = f"Measured {facts['date']} by {facts['command']} on {facts['CPU']}{with_what}."
    more = "[How to read this](index.md#how-to-read-them)."
    head = [f"# {title}", "", f"{measured} {more}", "", *([method, ""] if method else [])]
    return "\n".join([*head, *(section.markdown() for section in sections)])


def command(stem: str) -> str:
    """How the benchmark `stem`.py was started."""
    return f"`{shlex.join(['python', f'benchmarks/{stem}.py', *sys.argv[1:]])}`"


def write(
    folder: Path, stem: str, text: str, facts: Mapping[str, str], sections: Sequence[Section]
) -> None:
    """Write a page and the raw numbers beside it.

    Args:
        folder: folder of both; made if it is missing.
        stem: what the names of both files begin with.
        text: the page.
        facts: what the numbers depend on, by name.
        sections: of the page.
    """
    raw = {"facts": facts, "sections": [section.saved() for section in sections]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.md").write_text(text, encoding="utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def publish(
    folder: Path | None,
    stem: str,
    title: str,
    facts: Mapping[str, str],
    sections: Sequence[Section],
    method: str = "",
) -> None:
    """Write a page and the raw numbers beside it, or print the page.

    Args:
        folder: folder of both; None to print.
        stem: what the names of both files begin with.
        title: heading of the page.
        facts: what the numbers depend on, by name.
        sections: of the page.
        method: as of `page`.
    """
    text = page(title, facts, sections, method)
    if folder is None:
        print(text)
    else:
        write(folder, stem, text, facts, sections)


def ratio(value: Spread) -> str:
    """As in `2.31 (2.20-2.40)`."""
    return f"{value.median:.2f} ({value.low:.2f}–{value.high:.2f})"


def around(values: Sequence[float], decimals: int) -> str:
    """The median, ± the greatest distance from it."""
    middle = statistics.median(values)
    return f"{middle:.{decimals}f}±{max(abs(v - middle) for v in values):.{decimals}f}"


def number(value: Spread) -> str:
    """With thousands separators, no decimals."""
    return f"{value.median:,.0f} ({value.low:,.0f}–{value.high:,.0f})"


def duration(value: Spread) -> str:
    """Seconds, in a unit that suits the median."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value.median * scale >= 1 or unit == "µs":
            break
    numbers = (f"{v * scale:.3g}" for v in (value.median, value.low, value.high))
    return "{} {unit} ({}–{})".format(*numbers, unit=unit)
