"""What `lockstep runs`, `report` and `diagnose` say about runs: lines, tables and pages."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.engine.call_history import listed
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.launching.remote import local_copy
from lockstep.observe import Measured, text
from lockstep.observe.reading.diagnosis import calls_of
from lockstep.observe.reading.diagnosis.verdict import causes, diagnosis_lines
from lockstep.observe.reading.differences import (
    Partings,
    config_differences,
    cost_of_run,
    costs_of_runs,
    letter,
    lines_of_partings,
    partings,
)
from lockstep.observe.reading.flight_recorder import missing, write_flight
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.listing import Summary, summarise
from lockstep.observe.storing.jsonl import dumps
from lockstep.observe.text import printable


def report(
    run_dirs: Sequence[Path], output: Path | None, markdown: bool, figures: Path | None
) -> list[str]:
    """Write a report.

    Args:
        run_dirs: one run, or several that are compared.
        output: file to write; in the run directory if left out, or here for several runs.
        markdown: whether to write Markdown, with pictures in a folder beside it.
        figures: folder to write each picture to as well, as SVG and PNG.

    Returns:
        Lines for people.

    Raises:
        RunDirectoryError: a run cannot be read.
        DataError: a file cannot be written.
        ConfigError: matplotlib is not installed.
    """
    # They import PyTorch, which takes a second, and `lockstep runs` and `diagnose` do without.
    from lockstep.observe.reading.report import page
    from lockstep.observe.reading.report.content import report_of

    run_dirs = [local_copy(run_dir) for run_dir in run_dirs]
    name = "report.md" if markdown else "report.html"
    path = output or (run_dirs[0] / name if len(run_dirs) == 1 else Path(name))
    blocks = list(report_of(run_dirs))
    lines = [f"report   {path}"]
    if markdown:
        folder = figures or path.with_name(f"{path.stem}_figures")
        page.write_pictures(blocks, folder, ("svg", "png") if figures else ("svg",))
        page.write_text(
            path, page.as_markdown(blocks, Path(os.path.relpath(folder, path.parent)).as_posix())
        )
        lines.append(f"figures  {folder}")
    else:
        page.write_text(path, page.as_html(blocks))
        if figures is not None:
            page.write_pictures(blocks, figures, ("svg", "png"))
            lines.append(f"figures  {figures}")
    return lines


def diagnose(run_dir: Path, as_json: bool, flight: Path | None = None) -> list[str]:
    """Lines about a run.

    Args:
        run_dir: path of the run directory.
        as_json: whether to give each cause as a JSON object, and `flight` as one more.
        flight: folder for the newest calls of ranks, for PyTorch's analyser.

    Raises:
        RunDirectoryError: it cannot be read.
        DataError: calls are requested, and there are none, or of too many ranks, or a file of them
            is damaged.
        ConfigError: the folder for them cannot be used.
    """
    run_dir = local_copy(run_dir)
    history = read_run(run_dir)
    summary = summarise(run_dir)
    found = causes(summary, history, calls_of(summary))
    written = [] if flight is None else [_write(run_dir, flight)]
    if as_json:
        return [dumps(one) for one in (*map(vars, found), *written)]
    calls = [line for one in written for line in _flight_lines(one)]
    return [printable(line) for line in (*diagnosis_lines(summary, history, found), *calls)]


def _write(run_dir: Path, folder: Path) -> dict[str, Any]:
    """Write the newest calls that a run directory holds; returns a description of them."""
    logs = RunDirectory(run_dir).flight.newest()
    unknown = write_flight(logs, folder)
    size = max(log.size for log in logs.values())
    return {
        "flight": str(folder),
        "step": max(log.step for log in logs.values()),
        "ranks": sorted(set(range(size)).difference(unknown)),
        "unknown_ranks": unknown,
    }


def _flight_lines(written: Mapping[str, Any]) -> Iterator[str]:
    """Lines that describe the written calls."""
    folder = written["flight"]
    yield ""
    yield f"calls of {listed(written['ranks'])}, after step {written['step']:,}: {folder}"
    yield f"  -> python -m torch.distributed.flight_recorder.fr_trace {shlex.quote(folder)}"
    for line in missing(written["unknown_ranks"]):
        yield f"  {line}"


_MOST_KEYS = 40


def compared(runs: Sequence[Path]) -> tuple[list[str], bool]:
    """Lines about the differences between the first run and each other one.

    Returns:
        The lines, and whether two runs that should be equal are not: the keys that can change the
        result are equal, and curves or parameters differ.

    Raises:
        RunDirectoryError: one of them cannot be read.
        CheckpointError: a checkpoint is damaged.
    """
    summaries = [summarise(run) for run in runs]
    histories = [read_run(run) for run in runs]
    lines = [f"{letter(n)}  {run}" for n, run in enumerate(runs)]
    costs = [cost_of_run(*run) for run in zip(summaries, histories, strict=True)]
    lines += ["", *_configs(summaries), "", *_results(summaries, costs)]
    differ = False
    hashes = [history.plan.config_hash if history.plan else "" for history in histories]
    for number in range(1, len(runs)):
        pair = f"{letter(0)} and {letter(number)}"
        found = partings((histories[0], histories[number]), (runs[0], runs[number]))
        lines += ["", *lines_of_partings(pair, found)]
        if hashes[0] == hashes[number] and summaries[0].task == summaries[number].task:
            verdict = _verdict(found, summaries[0], summaries[number])
            differ = differ or verdict is False
            meaning = {
                True: "they are",
                False: "they are not",
                None: "they have nothing in common yet",
            }
            lines.append(f"{pair} have one config, so they should be equal: {meaning[verdict]}")
    return lines, differ


def _verdict(found: Partings, one: Summary, other: Summary) -> bool | None:
    """Whether two runs of one config are equal; None if nothing could be compared."""
    have_ended = bool(one.sha256 and other.sha256) and one.step == other.step
    if found.curves or found.tensors or (have_ended and one.sha256 != other.sha256):
        return False
    return True if have_ended or found.num_steps or found.num_checkpoints else None


def _configs(summaries: Sequence[Summary]) -> Iterator[str]:
    found = config_differences([run.config for run in summaries])
    if not found:
        yield "config: the same"
        return
    yield f"config: {text.count(len(found), 'key')} with other values"
    for key, values in list(found.items())[:_MOST_KEYS]:
        yield f"  {key}: " + ", ".join(f"{letter(n)} {value}" for n, value in enumerate(values))
    if len(found) > _MOST_KEYS:
        yield f"  … and {len(found) - _MOST_KEYS} more"


def _results(summaries: Sequence[Summary], costs: Sequence[Measured]) -> Iterator[str]:
    rows = {
        "state": [run.state for run in summaries],
        "step": [f"{run.step:,}" for run in summaries],
        "ranks": [str(run.ranks) for run in summaries],
        "seconds": [text.number(run.value("seconds")) for run in summaries],
        "SHA-256": [run.sha256[:16] or "none" for run in summaries],
    }
    for name, *values in costs_of_runs(costs):
        rows[name] = [value or "none" for value in values]
    for name in dict.fromkeys(name for run in summaries for name in run.metrics):
        rows[name] = [
            repr(run.metrics[name]) if name in run.metrics else "none" for run in summaries
        ]
    widths = [max(len(row[n]) for row in rows.values()) for n in range(len(summaries))]
    first = max(map(len, rows))
    letters = [letter(n).rjust(w) for n, w in enumerate(widths)]
    yield " ".join(["result".ljust(first), *letters])
    for name, values in rows.items():
        cells = [value.rjust(width) for value, width in zip(values, widths, strict=True)]
        yield " ".join([name.ljust(first), *cells])


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
    runs: Sequence[Summary],
    folders: Sequence[Path],
    columns: str | None,
    num_found: int,
    where: str = "",
) -> None:
    """Print a table, or a message that there are no runs.

    Args:
        runs: to show.
        folders: where they are.
        columns: keys, instead of the usual ones.
        num_found: how many there are without the conditions.
        where: what the message calls the folders, if not by their paths.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)  # in a pipe there is nothing to fit into
    if not runs:
        where = where or ", ".join(map(str, folders))
        message = f"no runs in {where}"
        if num_found:
            message = f"none of {num_found} runs in {where} fulfils the conditions"
        console.print(message, highlight=False)
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
    # Metrics of the validation are more informative than those of training.
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
    """The path relative to the only given folder, or as it was given."""
    if len(folders) == 1 and path != folders[0]:
        return os.path.relpath(path, folders[0])
    return str(path)


def _keys(columns: str) -> list[str]:
    return [key.strip() for key in columns.split(",") if key.strip()]


def _is_number(cell: Text) -> bool:
    return cell.plain.replace(",", "").replace(".", "").replace("-", "").isdigit()
