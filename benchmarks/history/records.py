"""What was found of revisions, kept in the repository, and the page that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.history.cases import CASES
from benchmarks.history.judging import Ratio


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
    """All records as Markdown, newest first, a table for each case."""
    lines = [
        "# What made what slower",
        "",
        "Made by `python -m benchmarks.history record`. Each commit and the one recorded before it "
        "run in turn on one machine. A ratio has its bounds of 95 % confidence. Times of different "
        "days cannot be compared; ratios can.",
        "",
    ]
    for name, case in CASES.items():
        own = [record for record in reversed(records) if record.case == name]
        if not own:
            continue
        lines += [f"## {case.text}", "", "| commit | date | time | over the one before | |"]
        lines += ["| --- | --- | --- | --- | --- |", *map(_row, own), ""]
    return "\n".join(lines)


def _row(record: Record) -> str:
    found, day = record.ratio, record.date
    ratio = f"{found.median:.3f} ({found.low:.3f}–{found.high:.3f}) of {record.against[:9]}"
    verdict = "" if found.verdict == "alike" else f"**{found.verdict}**"
    return f"| {record.commit[:9]} | {day} | {1e3 * record.seconds:.4g} ms | {ratio} | {verdict} |"
