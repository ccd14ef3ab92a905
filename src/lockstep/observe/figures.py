"""Figures of matplotlib, and files of them with the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config.files import replacing_binary
from lockstep.errors import ConfigError, DataError, file_errors, needing

_DPI = 110


def new_figure(width: float, height: float, title: str = "", extra: str = "ufs") -> Any:
    """An empty figure.

    Args:
        width: width in inches.
        height: height in inches.
        title: title of the whole figure; none if empty.
        extra: extra of this package that brings matplotlib for the caller.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with needing(extra, "pictures need matplotlib"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def check_picture(path: Path) -> None:
    """Refuse a path that `save` does not know how to write to.

    Raises:
        ConfigError: it ends neither in .svg nor in .png.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{path}: must end in .svg or .png")


def save(figure: Any, path: Path) -> Path:
    """Write a figure, as SVG if the path ends so, else as PNG; the same bytes each time.

    Raises:
        DataError: it cannot be written.
    """
    from matplotlib import rc_context

    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with (
        file_errors(DataError, path),
        rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}),
        replacing_binary(path, durable=False) as file,
    ):
        figure.savefig(file, dpi=_DPI, format=kind, metadata=metadata)
    return path
