"""`lockstep diagnose`: why a run is slow, or has ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.flight.story import listed
from lockstep.observe.layout import printable
from lockstep.observe.storing.rows import dumps
from lockstep.reading.diagnosis.verdict import causes, told
from lockstep.reading.flight_recorder import missing, write_flight
from lockstep.reading.follow import read_run
from lockstep.reading.listing import summarise


def diagnose(run_dir: Path, as_json: bool, flight: Path | None = None) -> list[str]:
    """Lines about a run.

    Args:
        run_dir: of the run.
        as_json: whether to give each cause as a JSON object.
        flight: folder for the newest calls of ranks, for PyTorch's analyser.

    Raises:
        RunDirectoryError: it cannot be read.
        DataError: calls are asked for, and there are none, or a file of them is damaged.
        ConfigError: the folder for them cannot be used.
    """
    history = read_run(run_dir)
    summary = summarise(run_dir)
    found = causes(summary, history)
    said = [] if flight is None else list(_flight(run_dir, flight))
    if as_json:
        return [dumps(vars(cause)) for cause in found]
    return [printable(line) for line in (*told(summary, history, found), *said)]


def _flight(run_dir: Path, folder: Path) -> Iterator[str]:
    """Write the calls that a run directory holds; lines about them."""
    logs = RunDirectory(run_dir).flight.newest()
    unknown = write_flight(logs, folder)
    step = max(log.step for log in logs.values())
    yield ""
    yield f"calls of {listed({log.rank for log in logs.values()})}, after step {step:,}: {folder}"
    yield f"  -> python -m torch.distributed.flight_recorder.fr_trace {shlex.quote(str(folder))}"
    for line in missing(unknown):
        yield f"  {line}"
