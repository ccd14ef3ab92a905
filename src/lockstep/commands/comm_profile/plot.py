"""Latency and bandwidth of a communication profile over the size, on logarithmic axes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, DataError
from lockstep.files import replacing_binary
from lockstep.planning.profile.profile import Measurement, Profile
from lockstep.reading.report.blocks import Picture
from lockstep.reading.report.page import rendered
from lockstep.recipes.pictures import new_figure

KINDS = ("svg", "png")
_EXTRA = "report"
_LINES = {"lockstep": "-", "torch": "--"}
_SCOPES = {"inside": "inside a host", "between": "between hosts", "all": "all ranks"}


def check_plot(path: Path) -> str:
    """The kind of picture that a file is to hold, once it is sure that it can be drawn.

    Raises:
        ConfigError: its name ends in something else, or matplotlib is not installed.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise ConfigError(f"--plot {path}: must end in .svg or .png")
    new_figure(1.0, 1.0, "", _EXTRA)
    return kind


def write_plot(path: Path, profile: Profile) -> None:
    """Draw a profile.

    Raises:
        ConfigError: as `check_plot`.
        DataError: the file cannot be written.
    """
    kind = check_plot(path)
    picture = rendered(Picture("comm-profile", "Communication", _figure(profile)), kind)
    try:
        with replacing_binary(path) as file:
            file.write(picture)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def _figure(profile: Profile) -> Any:
    """For each scope, times with their fits on the left, and bus bandwidths on the right."""
    scopes = list(dict.fromkeys(m.scope for m in profile.measurements))
    title = f"{profile.num_ranks} ranks over {profile.transport} ({profile.launcher})"
    figure = new_figure(12.0, 1.0 + 4.6 * len(scopes), title, _EXTRA)
    for row, scope in enumerate(scopes):
        of = [m for m in profile.measurements if m.scope == scope and m.points[0].num_bytes]
        latency = figure.add_subplot(len(scopes), 2, 2 * row + 1)
        speed = figure.add_subplot(len(scopes), 2, 2 * row + 2)
        numbers = {"lockstep": itertools.count(), "torch": itertools.count()}
        for measurement in of:
            colour = f"C{next(numbers[measurement.layer]) % 10}"
            _draw(measurement, colour, latency, speed)
        _label(latency, f"{_SCOPES[scope]}: median time, and fits (thin)", "µs")
        _label(speed, f"{_SCOPES[scope]}: bus bandwidth", "GB/s")
        if of:
            speed.legend(fontsize=7, ncols=2)
    return figure


def _draw(measurement: Measurement, colour: str, latency: Any, speed: Any) -> None:
    sizes = [point.num_bytes for point in measurement.points]
    style = {"color": colour, "linestyle": _LINES[measurement.layer], "marker": "."}
    label = f"{measurement.layer}/{measurement.operation}"
    latency.plot(sizes, [1e6 * p.median_s for p in measurement.points], label=label, **style)
    speed.plot(sizes, [1e-9 * p.bus_bytes_per_s for p in measurement.points], label=label, **style)
    for piece in measurement.fit.pieces if measurement.fit else ():
        held = [n for n in sizes if piece.first_bytes <= n <= piece.last_bytes]
        fitted = [1e6 * piece.seconds(n) for n in held]
        latency.plot(held, fitted, color=colour, linewidth=0.5)


def _label(axes: Any, title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("bytes", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.3)
