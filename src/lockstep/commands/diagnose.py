"""`lockstep diagnose`: why a run is slow, or has ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.flight.story import listed
from lockstep.observe.layout import printable
from lockstep.observe.storing.rows import dumps
from lockstep.reading.diagnosis.calls import calls_of
from lockstep.reading.diagnosis.verdict import causes, told
from lockstep.reading.flight_recorder import missing, write_flight
from lockstep.reading.follow import read_run
from lockstep.reading.listing import summarise


def diagnose(run_dir: Path, as_json: bool, flight: Path | None = None) -> list[str]:
    """Lines about a run.

    Args:
        run_dir: of the run.
        as_json: whether to give each cause as a JSON object, and `flight` as one more.
        flight: folder for the newest calls of ranks, for PyTorch's analyser.

    Raises:
        RunDirectoryError: it cannot be read.
        DataError: calls are asked for, and there are none, or of too many ranks, or a file of them
            is damaged.
        ConfigError: the folder for them cannot be used.
    """
    history = read_run(run_dir)
    summary = summarise(run_dir)
    found = causes(summary, history, calls_of(summary))
    written = [] if flight is None else [_write(run_dir, flight)]
    if as_json:
        return [dumps(one) for one in (*map(vars, found), *written)]
    said = [line for one in written for line in _told(one)]
    return [printable(line) for line in (*told(summary, history, found), *said)]


def _write(run_dir: Path, folder: Path) -> dict[str, Any]:
    """Write the calls that a run directory holds; what there is to say of them."""
    logs = RunDirectory(run_dir).flight.newest()
    unknown = write_flight(logs, folder)
    size = max(log.size for log in logs.values())
    return {
        "flight": str(folder),
        "step": max(log.step for log in logs.values()),
        "ranks": sorted(set(range(size)).difference(unknown)),
        "unknown_ranks": unknown,
    }


def _told(written: Mapping[str, Any]) -> Iterator[str]:
    """Lines about calls that were written."""
    folder = written["flight"]
    yield ""
    yield f"calls of {listed(written['ranks'])}, after step {written['step']:,}: {folder}"
    yield f"  -> python -m torch.distributed.flight_recorder.fr_trace {shlex.quote(folder)}"
    for line in missing(written["unknown_ranks"]):
        yield f"  {line}"
