"""A rank's own standard output."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """Write each line of standard output as soon as it is whole, and in one go.

    Ranks may share one pipe, where lines written piece by piece (as `PYTHONUNBUFFERED` does)
    would mix.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
