"""What has become of a sweep: a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.commands.runs.table import print_table
from lockstep.commands.sweep.grid import Grid
from lockstep.errors import ConfigError
from lockstep.observe.layout import printable
from lockstep.reading.choice import chosen
from lockstep.reading.listing import Summary
from lockstep.recipes.pictures import new_figure, save

_WIDTH, _HEIGHT = 4.0, 3.4
"""Inches of a panel."""
_MOST_PANELS = 6
_MOST_NAMES = 20
"""Metrics that are named where none of them was chosen."""
_LOG_RATIO = 20.0
"""Ratio of the greatest to the least value from which an axis is logarithmic."""


def ordered_by(runs: Sequence[Summary], metric: str | None) -> tuple[str, bool]:
    """The key that runs are sorted by, and whether more of it is better.

    Args:
        runs: runs of a sweep, of which the first says what they watch.
        metric: a key, descending behind a `-`, or the plain name of a metric of `val`; None for the
            one that the runs watch.
    """
    config: Mapping[str, Any] = next((run.config for run in runs if run.config), {})
    watch = str(config.get("watch", "loss"))
    watched = watch if "/" in watch else f"val/{watch}"
    key = (metric or watched).removeprefix("-")
    of_val = f"val/{key}"
    if "/" not in key and (_has(runs, of_val) or not _has(runs, key)):
        key = of_val
    is_most_best = key == watched and config.get("watch_mode") == "max"
    return key, is_most_best or (metric or "").startswith("-")


def unknown(runs: Sequence[Summary], key: str) -> str:
    """What to say if no run has the metric that they are to be sorted by; else empty."""
    names = sorted({name for run in runs for name in run.metrics})
    if not names or _has(runs, key):
        return ""
    said = ", ".join(map(printable, names[:_MOST_NAMES]))
    return f"no run has {printable(key)}: choose another --metric: {said}"


def _has(runs: Sequence[Summary], key: str) -> bool:
    return any(run.value(key) is not None for run in runs)


def print_outcome(
    runs: Sequence[Summary], grid: Grid, metric: str, is_more_better: bool, folder: Path
) -> None:
    """Print the runs of a sweep, the best first."""
    order = f"-{metric}" if is_more_better else metric
    columns = ",".join([*grid.keys, metric, "state", "step", "seconds", "name"])
    print_table(chosen(runs, [], order), [folder], columns, num_found=len(runs))


def draw(runs: Sequence[Summary], grid: Grid, metric: str, path: Path) -> Path | None:
    """Draw a metric over each key that varies, as PNG.

    Returns:
        The picture's path; None if no run has the metric, or no key varies.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: it cannot be written.
    """
    values = [run.value(metric) for run in runs]
    shown = [
        (run, value)
        for run, value in zip(runs, values, strict=True)
        if isinstance(value, float) and math.isfinite(value)
    ]
    keys = grid.keys[:_MOST_PANELS]
    if not shown or not keys:
        return None
    figure = new_figure(_WIDTH * len(keys), _HEIGHT, "", extra="report")
    panels = figure.subplots(1, len(keys), squeeze=False, sharey=True)[0]
    heights = [value for _, value in shown]
    for key, panel in zip(keys, panels, strict=True):
        places = [run.value(key) for run, _ in shown]
        numbers = [p for p in places if isinstance(p, int | float) and not isinstance(p, bool)]
        if len(numbers) == len(places):
            panel.plot(numbers, heights, "o")
            if min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO:
                panel.set_xscale("log")
        else:
            panel.plot([printable(str(place))[:40] for place in places], heights, "o")
        panel.set_xlabel(printable(key))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(printable(metric))
    return save(figure, path)


def try_to_draw(runs: Sequence[Summary], grid: Grid, metric: str, path: Path) -> str:
    """As `draw`: what to say of it, empty if there is nothing to draw."""
    try:
        picture = draw(runs, grid, metric, path)
    except ConfigError as error:
        return f"no picture: {error}"
    return f"picture: {picture}" if picture is not None else ""
