"""`lockstep diagnose`: why a run is slow, or has ended."""

from __future__ import annotations

from pathlib import Path

from lockstep.observe.layout import printable
from lockstep.observe.storing.rows import dumps
from lockstep.reading.diagnosis.verdict import causes, told
from lockstep.reading.follow import read_run
from lockstep.reading.listing import summarise


def diagnose(run_dir: Path, as_json: bool) -> list[str]:
    """Lines about a run.

    Args:
        run_dir: of the run.
        as_json: whether to give each cause as a JSON object.

    Raises:
        RunDirectoryError: it cannot be read.
    """
    history = read_run(run_dir)
    summary = summarise(run_dir)
    found = causes(summary, history)
    if as_json:
        return [dumps(vars(cause)) for cause in found]
    return [printable(line) for line in told(summary, history, found)]
