"""What was found of revisions, kept in the repository, and the page that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.history.cases import CASES
from benchmarks.history.judging import Ratio

_SHOWN = 4
"""Measurements that the page shows."""


@dataclass(frozen=True)
class Record:
    """A case of a commit beside that of an earlier one, measured in turn.

    Attributes:
        commit: its hash.
        date: day of the measurement.
        against: hash of the earlier commit.
        case: name of the case.
        seconds: median of the rounds of the commit.
        ratio: its time over that of the earlier one.
        machine: what the times depend on.
    """

    commit: str
    date: str
    against: str
    case: str
    seconds: float
    ratio: Ratio
    machine: Mapping[str, str]


def read(file: Path) -> list[Record]:
    """All records, oldest first; none if there is no file.

    Raises:
        SystemExit: a line of it is damaged.
    """
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            records.append(Record(**values | {"ratio": Ratio(**values["ratio"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{file}, line {number}: is no record: {error}") from None
    return records


def add(file: Path, records: Sequence[Record]) -> None:
    """Write further records behind those that are there."""
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(f"{json.dumps(asdict(record))}\n" for record in records)


def page(records: Sequence[Record]) -> str:
    """The newest measurements as Markdown: a row for each case, a column for each commit."""
    newest_first = ((r.commit, r.date, r.against) for r in reversed(records))
    commits = list(dict.fromkeys(newest_first))[:_SHOWN]
    found = {(r.commit, r.date, r.against, r.case): r for r in records}
    heads = [f"{commit[:9]} over {against[:9]}, {date}" for commit, date, against in commits]
    lines = [
        "# Speed history, by commit",
        "",
        "Made by `python -m benchmarks.history record`. Each commit and an earlier one run in turn "
        "on one machine. A cell has the time, and its ratio to the earlier commit's with bounds of "
        "95 % confidence. Times of different days cannot be compared; ratios can. Older "
        "measurements are in `history.jsonl`.",
        "",
        f"| case | {' | '.join(heads)} |",
        f"| {' | '.join(['---'] * (1 + len(heads)))} |",
    ]
    for name, case in CASES.items():
        own = [found.get((*commit, name)) for commit in commits]
        if any(own):
            cells = [_cell(record) if record else "" for record in own]
            lines.append(f"| {case.text} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(record: Record) -> str:
    found = record.ratio
    verdict = "" if found.verdict == "alike" else f", **{found.verdict}**"
    ratio = f"{found.median:.3f} ({found.low:.3f}–{found.high:.3f})"
    return f"{1e3 * record.seconds:.4g} ms, {ratio}{verdict}"
