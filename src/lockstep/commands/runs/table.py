"""Runs as a table for people, or as JSON for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.observe import text
from lockstep.observe.layout import printable
from lockstep.observe.storing.rows import dumps
from lockstep.reading.listing import Summary

_FIELDS = (
    "path", "task", "state", "step", "total_steps", "ranks", "started", "newest", "sha256", "tags",
    "metrics", "problems",
)  # fmt: skip
_COLOURS = {
    "running": "green", "completed": "cyan", "stopped": "yellow", "failed": "red", "killed": "red",
}  # fmt: skip
_NUM_METRICS = 3
_WIDE = 10_000


def as_rows(runs: Sequence[Summary], columns: str | None) -> Iterator[str]:
    """A JSON object for each run, each on a line."""
    for run in runs:
        if columns is not None:
            yield dumps({key: run.value(key) for key in _keys(columns)}) + "\n"
        else:
            values = {key: getattr(run, key) for key in _FIELDS}
            yield dumps(values | {"path": str(run.path)}) + "\n"


def print_table(
    runs: Sequence[Summary], folders: Sequence[Path], columns: str | None, num_found: int
) -> None:
    """Print a table, or that there is nothing to show."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)  # in a pipe there is nothing to fit into
    if not runs:
        where = ", ".join(map(str, folders))
        said = f"no runs in {where}"
        if num_found:
            said = f"none of {num_found} runs in {where} fulfils the conditions"
        console.print(said, highlight=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    keys = _keys(columns) if columns is not None else None
    cells = [_chosen(run, keys) if keys else _usual(run, folders) for run in runs]
    for number, name in enumerate(keys or _HEADERS):
        is_number = all(_is_number(row[number]) for row in cells)
        table.add_column(
            printable(name),
            justify="right" if is_number else "left",
            no_wrap=number > 0,
            overflow="fold" if number == 0 else "ellipsis",
        )
    for row in cells:
        table.add_row(*row)
    console.print(table)
    for run in runs:
        for problem in run.problems:
            console.print(f"{run.path}: {printable(problem)}", style="red", markup=False)


_HEADERS = ("run", "task", "state", "steps", "ranks", "started", "time", "metrics", "tags")


def _usual(run: Summary, folders: Sequence[Path]) -> list[Text]:
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)) if run.started else ""
    metrics = list(run.metrics.items())
    # Those of the validation say more than those of training.
    metrics.sort(key=lambda item: item[0].startswith("train/"))
    shown = "  ".join(text.measures(dict(metrics[:_NUM_METRICS])))
    values = (
        _name(run.path, folders), run.task, run.state, f"{run.step:,}{total}",
        str(run.ranks or ""), began, text.duration(run.value("seconds")) if run.started else "",
        shown, " ".join(run.tags),
    )  # fmt: skip
    styles = {2: _COLOURS.get(run.state, "")}
    return [Text(printable(v), style=styles.get(n, "")) for n, v in enumerate(values)]


def _chosen(run: Summary, keys: Sequence[str]) -> list[Text]:
    return [Text(printable(_formatted(run.value(key)))) for key in keys]


def _formatted(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return text.number(value)
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _name(path: Path, folders: Sequence[Path]) -> str:
    """The path from the only folder that was asked for, or as it was given."""
    if len(folders) == 1 and path != folders[0]:
        return os.path.relpath(path, folders[0])
    return str(path)


def _keys(columns: str) -> list[str]:
    return [key.strip() for key in columns.split(",") if key.strip()]


def _is_number(cell: Text) -> bool:
    return cell.plain.replace(",", "").replace(".", "").replace("-", "").isdigit()
