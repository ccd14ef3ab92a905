"""`lockstep report`: what runs came to, on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.reading.report.content import report_of
from lockstep.reading.report.page import as_html, as_markdown, write_pictures, write_text


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
