"""`lockstep report` and `lockstep diagnose`: pages about runs, and causes of slow or ended runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.engine.call_history import listed
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.launching.remote import local_copy
from lockstep.observe.reading.diagnosis import calls_of
from lockstep.observe.reading.diagnosis.verdict import causes, diagnosis_lines
from lockstep.observe.reading.flight_recorder import missing, write_flight
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.listing import summarise
from lockstep.observe.reading.report.content import report_of
from lockstep.observe.reading.report.page import as_html, as_markdown, write_pictures, write_text
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
    run_dirs = [local_copy(run_dir) for run_dir in run_dirs]
    name = "report.md" if markdown else "report.html"
    path = output or (run_dirs[0] / name if len(run_dirs) == 1 else Path(name))
    blocks = list(report_of(run_dirs))
    lines = [f"report   {path}"]
    if markdown:
        folder = figures or path.with_name(f"{path.stem}_figures")
        write_pictures(blocks, folder, ("svg", "png") if figures else ("svg",))
        write_text(path, as_markdown(blocks, Path(os.path.relpath(folder, path.parent)).as_posix()))
        lines.append(f"figures  {folder}")
    else:
        write_text(path, as_html(blocks))
        if figures is not None:
            write_pictures(blocks, figures, ("svg", "png"))
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
