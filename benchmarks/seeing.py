"""What all benchmarks of seeing, explaining and predicting have found, on one page.

Writes `docs/benchmarks/seeing.md` from the pages that the other programs have written; measures
nothing itself.
"""

from __future__ import annotations

import json
import re

from run import DOCS

PAGES = {
    "watched": "What it costs to be watched, and what an event costs",
    "monitor_page": "The monitor's page: a large run, many runs; TensorBoard beside it",
    "diagnosis": "Injected causes: which one `lockstep diagnose` names first",
    "plans": "Predicted beside measured: steps and memory",
    "comm-profile": "`lockstep comm-profile` beside plain loops",
}
"""Stems of the pages, and what is in them."""
_VERDICT = re.compile(r"^- Target .*$", re.MULTILINE)


def main() -> None:
    """Put the verdicts of all pages on one."""
    lines = [
        "# Seeing, explaining, predicting", "",
        "What the pages below have found of the targets, with the command of each. Made by "
        "`python benchmarks/seeing.py`, which measures nothing itself.", "",
    ]  # fmt: skip
    for stem, title in PAGES.items():
        if not (DOCS / f"{stem}.md").exists():
            lines += [f"## {title}", "", f"Not measured yet: `python benchmarks/{stem}.py`.", ""]
            continue
        text = (DOCS / f"{stem}.md").read_text(encoding="utf-8")
        facts = json.loads((DOCS / f"{stem}.json").read_text(encoding="utf-8"))["facts"]
        lines += [f"## [{title}]({stem}.md)", "", f"{facts['date']}: {facts['command']}", ""]
        lines += [*_VERDICT.findall(text), ""]
    (DOCS / "seeing.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
