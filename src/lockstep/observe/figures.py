"""Drawing with matplotlib, and pictures of runs: curves, ranks over time, and costs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.engine.events import Checkpointed, Evaluated, Recovered, RunStarted
from lockstep.errors import ConfigError, DataError
from lockstep.observe import text
from lockstep.observe.reading.history import KINDS, Curve, History
from lockstep.observe.reading.report.page import Block, Paragraph, Picture
from lockstep.observe.text import printable

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


_EXTRA = "report"
_MOST_POINTS = 2000
_MOST_RANKS = 64
_MOST_CURVES = 24
_COLOURS = ("#3b76af", "#c9823a", "#5a9e6f", "#9a6fb0")
_OTHERS = ("samples_per_s", "compute_efficiency", "grad_norm", "lr")


def pictures(histories: Mapping[str, History]) -> Iterator[Block]:
    """All pictures that the events of some runs allow, and how many curves are left out.

    Args:
        histories: by the names of the runs.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    metrics = _metrics(histories.values())
    if metrics:
        yield Picture("metrics", "Metrics", _curves(histories, metrics[:_MOST_CURVES]))
    if (more := len(metrics) - _MOST_CURVES) > 0:
        yield Paragraph(
            f"{more:,} further {'metric is' if more == 1 else 'metrics are'} in events.jsonl."
        )
    others = [[name] for name in _OTHERS if any(name in h.curves for h in histories.values())]
    if others:
        yield Picture("speed", "Speed, gradient and learning rate", _curves(histories, others))
    for name, history in histories.items():
        suffix = f" of {name}" if len(histories) > 1 else ""
        key = f"_{name}" if len(histories) > 1 else ""
        if history.processes:
            yield Picture(f"ranks{key}", f"Ranks{suffix} over time", _timeline(history))
        if any(sum(p.seconds.values()) for p in history.processes):
            yield Picture(
                f"time{key}", f"What the ranks{suffix} spent their time with", _split(history)
            )


def _metrics(histories: Any) -> list[list[str]]:
    """Curves that share axes: a metric of all splits; those that were only logged come last."""
    together: dict[str, list[str]] = {}
    for history in histories:
        for name in history.curves:
            _, _, metric = name.partition("/")
            if metric:
                names = together.setdefault(metric, [])
                if name not in names:
                    names.append(name)
    return sorted(
        together.values(), key=lambda names: all(name.startswith("log/") for name in names)
    )


def _curves(histories: Mapping[str, History], groups: Sequence[Sequence[str]]) -> Any:
    """A panel for each group of curves."""
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = new_figure(5.2 * columns, 2.7 * rows, "", _EXTRA)
    figure.suptitle(None)
    for number, names in enumerate(groups, 1):
        axes = figure.add_subplot(rows, columns, number)
        for run, (title, history) in enumerate(histories.items()):
            for name in names:
                if name not in history.curves:
                    continue
                steps, values = thinned(history.curves[name])
                label = name if len(histories) == 1 else f"{title}: {name}"
                of_training = name.startswith("train/")
                axes.plot(
                    steps,
                    values,
                    label=_plain(label),
                    linewidth=1.1,
                    color=f"C{run if len(histories) > 1 else names.index(name)}",
                    linestyle="--" if of_training and len(names) > 1 else "-",
                    marker="." if len(values) < 40 else None,
                )
        metric = names[0].partition("/")[2]
        axes.set_title(_plain(metric or names[0]), fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, alpha=0.3)
        if len(names) > 1 or len(histories) > 1:
            axes.legend(fontsize=7)
    return figure


def thinned(curve: Curve, most: int = _MOST_POINTS) -> tuple[list[int], list[float]]:
    """At most about so many points of a curve: the least and the greatest of each stretch."""
    count = len(curve.steps)
    if count <= most:
        return list(curve.steps), list(curve.values)
    places: list[int] = []
    stretch = math.ceil(2 * count / most)
    for first in range(0, count, stretch):
        part = range(first, min(first + stretch, count))
        finite = [i for i in part if math.isfinite(curve.values[i])]
        ends = {part[0]}
        if finite:
            ends = {min(finite, key=curve.values.__getitem__)}
            ends.add(max(finite, key=curve.values.__getitem__))
        places += sorted(ends)
    return [curve.steps[i] for i in places], [curve.values[i] for i in places]


def _timeline(history: History) -> Any:
    """A bar for each process from its start to its end, with what has happened."""
    processes = history.processes[:_MOST_RANKS]
    figure = new_figure(10.4, 1.3 + 0.24 * len(processes), "", _EXTRA)
    figure.suptitle(None)
    axes = figure.add_subplot(1, 1, 1)
    zero = min(process.since for process in history.processes)
    for row, process in enumerate(processes):
        until = process.until or history.newest
        lost = process.until is not None
        axes.barh(
            row,
            until - process.since,
            left=process.since - zero,
            height=0.7,
            color="#d9a3a3" if lost else "#a9c4e4",
        )
        if lost:
            axes.plot([until - zero], [row], marker="x", color="#b03030", markersize=7)
    marks = (
        (Checkpointed, "checkpoint", "#9a6fb0", "|"), (Evaluated, "evaluation", "#5a9e6f", "."),
        (Recovered, "recovered", "#b03030", "^"), (RunStarted, "started", "#59636e", "D"),
    )  # fmt: skip
    for kind, label, colour, marker in marks:
        times = [h.time - zero for h in history.happenings if isinstance(h.event, kind)]
        times = [time for time in times if time >= 0]
        if times:
            below = [len(processes)] * len(times)
            axes.plot(times, below, marker, color=colour, label=label, markersize=6)
    names = [f"rank {p.rank} (slot {p.joined.slot})" for p in processes]
    axes.set_yticks([*range(len(processes)), len(processes)], [*names, "events"], fontsize=7)
    axes.set_xlabel("seconds since the newest start", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    figure.legend(fontsize=7, ncols=4, loc="outside lower left", frameon=False)
    return figure


def _split(history: History) -> Any:
    """What each process spent its time with, in per cent."""
    processes = [p for p in history.processes if sum(p.seconds.values())][:_MOST_RANKS]
    figure = new_figure(10.4, 1.2 + 0.24 * len(processes), "", _EXTRA)
    figure.suptitle(None)
    axes = figure.add_subplot(1, 1, 1)
    left = [0.0] * len(processes)
    for kind, name, colour in zip(KINDS, text.KINDS_OF_WORK, _COLOURS, strict=True):
        shares = [100 * p.seconds[kind] / sum(p.seconds.values()) for p in processes]
        axes.barh(range(len(processes)), shares, left=left, color=colour, label=name, height=0.7)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    names = [f"rank {p.rank} (slot {p.joined.slot})" for p in processes]
    axes.set_yticks(range(len(processes)), names, fontsize=7)
    axes.set_xlabel("% of the time that the rank has measured", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    figure.legend(fontsize=7, ncols=4, loc="outside lower left", frameon=False)
    return figure


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return printable(text).replace("\n", " ").replace("$", r"\$")
