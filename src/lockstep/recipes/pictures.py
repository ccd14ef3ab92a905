"""Drawing with matplotlib: no window, no state between pictures, no half-written file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, DataError

_DPI = 110


def new_figure(width: float, height: float, title: str, extra: str = "ufs") -> Any:
    """An empty figure of some inches.

    Args:
        width: width in inches.
        height: height in inches.
        title: title of the whole figure.
        extra: extra of this package that brings matplotlib for the caller.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f'pictures need matplotlib: pip install "lockstep-train[{extra}]"'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def picture_path(path: Path) -> Path:
    """A path that `save` can write to by its ending.

    Raises:
        ConfigError: it ends neither in .svg nor in .png.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path}: a picture must end in .svg or .png")
    return path


def save(figure: Any, path: Path) -> Path:
    """Write a figure, as SVG if the path ends so, else as PNG; the same bytes each time.

    Raises:
        DataError: it cannot be written.
    """
    kind = "svg" if path.suffix == ".svg" else "png"
    own = {"Date": None} if kind == "svg" else {"Software": None}
    from matplotlib import rc_context

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}):
            figure.savefig(temporary, dpi=_DPI, format=kind, metadata=own)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path
