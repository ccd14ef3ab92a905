"""The pictures of a report: curves, ranks over time, what ranks spend their time on, histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.engine.events import Checkpointed, Evaluated, Recovered, RunStarted
from lockstep.observe.figures import new_figure
from lockstep.observe.reading.history import KINDS, Curve, History, Process
from lockstep.observe.reading.report.page import Block, Paragraph, Picture
from lockstep.observe.text import KINDS_OF_WORK, printable

_EXTRA = "report"
_MAX_POINTS = 2000
_MAX_RANKS = 64
_MAX_CURVES = 24
_COLOURS = ("#3b76af", "#c9823a", "#5a9e6f", "#9a6fb0")
_OTHERS = ("samples_per_s", "compute_efficiency", "grad_norm", "lr")


def pictures(histories: Mapping[str, History]) -> Iterator[Block]:
    """All pictures that the events of some runs allow, and how many curves are left out.

    Args:
        histories: events of the runs, by the names of the runs.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    metrics = _metrics(histories.values())
    if metrics:
        yield Picture("metrics", "Metrics", _curves(histories, metrics[:_MAX_CURVES]))
    if (more := len(metrics) - _MAX_CURVES) > 0:
        yield Paragraph(
            f"{more:,} further {'metric is' if more == 1 else 'metrics are'} in events.jsonl."
        )
    others = [[name] for name in _OTHERS if any(name in h.curves for h in histories.values())]
    if others:
        yield Picture("speed", "Speed, gradient and learning rate", _curves(histories, others))
    for name, history in histories.items():
        suffix, key = (f" of {name}", f"_{name}") if len(histories) > 1 else ("", "")
        if history.processes:
            yield Picture(f"ranks{key}", f"Ranks{suffix} over time", _timeline(history))
        if any(sum(p.seconds.values()) for p in history.processes):
            title = f"What the ranks{suffix} spent their time with"
            yield Picture(f"time{key}", title, _shares(history))


def _metrics(histories: Iterable[History]) -> list[list[str]]:
    """Curves that share axes: a metric of all splits; those that were only logged come last."""
    together: dict[str, dict[str, None]] = {}
    for history in histories:
        for name in history.curves:
            _, _, metric = name.partition("/")
            if metric:
                together.setdefault(metric, {})[name] = None
    groups = map(list, together.values())
    return sorted(groups, key=lambda names: all(name.startswith("log/") for name in names))


def _curves(histories: Mapping[str, History], groups: Sequence[Sequence[str]]) -> Any:
    """A panel for each group of curves."""
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = new_figure(5.2 * columns, 2.7 * rows, extra=_EXTRA)
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


def thinned(curve: Curve, most: int = _MAX_POINTS) -> tuple[list[int], list[float]]:
    """About `most` points of a curve at most: the least and the greatest of each stretch."""
    count = len(curve.steps)
    if count <= most:
        return list(curve.steps), list(curve.values)
    kept: list[int] = []
    stretch = math.ceil(2 * count / most)
    for first in range(0, count, stretch):
        part = range(first, min(first + stretch, count))
        finite = [i for i in part if math.isfinite(curve.values[i])] or [first]
        ends = {pick(finite, key=curve.values.__getitem__) for pick in (min, max)}
        kept += sorted(ends)
    return [curve.steps[i] for i in kept], [curve.values[i] for i in kept]


def _timeline(history: History) -> Any:
    """A bar for each process from its start to its end, and marks for events."""
    processes = history.processes[:_MAX_RANKS]
    figure, axes = _rank_axes(processes, "seconds since the newest start", ["events"])
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
    figure.legend(fontsize=7, ncols=4, loc="outside lower left", frameon=False)
    return figure


def _shares(history: History) -> Any:
    """What each process spent its time on, in per cent."""
    processes = [p for p in history.processes if sum(p.seconds.values())][:_MAX_RANKS]
    figure, axes = _rank_axes(processes, "% of the time that the rank has measured")
    left = [0.0] * len(processes)
    for kind, name, colour in zip(KINDS, KINDS_OF_WORK, _COLOURS, strict=True):
        shares = [100 * p.seconds[kind] / sum(p.seconds.values()) for p in processes]
        axes.barh(range(len(processes)), shares, left=left, color=colour, label=name, height=0.7)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    figure.legend(fontsize=7, ncols=4, loc="outside lower left", frameon=False)
    return figure


def _rank_axes(
    processes: Sequence[Process], label: str, more_rows: Sequence[str] = ()
) -> tuple[Any, Any]:
    """A figure, and its axes with a row for each process."""
    rows = [*(f"rank {p.rank} (slot {p.joined.slot})" for p in processes), *more_rows]
    figure = new_figure(10.4, 1.2 + 0.1 * len(more_rows) + 0.24 * len(processes), extra=_EXTRA)
    axes = figure.add_subplot(1, 1, 1)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    return figure, axes


def histogram(value: Any) -> Any:
    """A figure of a logged histogram.

    Args:
        value: `value` of the `Logged` event.

    Raises:
        KeyError: a part is missing.
        OverflowError: a count is infinite.
        TypeError: a part is no number.
        ValueError: a part is no number.
    """
    least, greatest = float(value["min"]), float(value["max"])
    counts = [int(count) for count in value["counts"]]
    if not counts or not -1e300 < least <= greatest < 1e300:
        raise ValueError(f"from {least:g} to {greatest:g} nothing can be drawn")
    width = (greatest - least) / len(counts)
    figure = new_figure(5.2, 2.7, extra=_EXTRA)
    axes = figure.add_subplot(1, 1, 1)
    centres = [least + width * (number + 0.5) for number in range(len(counts))]
    axes.bar(centres, counts, width=width or 1.0, color=_COLOURS[0])
    not_finite = {name: int(value[f"num_{name}"]) for name in ("nan", "inf")}
    beside = ", ".join(f"{count:,} {name}" for name, count in not_finite.items() if count)
    axes.set_xlabel(printable(f"value (beside {beside})" if beside else "value"), fontsize=8)
    axes.tick_params(labelsize=8)
    return figure


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return printable(text).replace("\n", " ").replace("$", r"\$")
