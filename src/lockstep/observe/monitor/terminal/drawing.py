"""The fields of a run's screen: texts with styles, and curves drawn in braille characters."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import set_cell_size
from rich.text import Text

from lockstep.observe import text
from lockstep.observe.monitor import describe
from lockstep.observe.monitor.describe import RankRow
from lockstep.observe.monitor.watch import Alert, Watched
from lockstep.observe.reading.diagnosis import Cause
from lockstep.observe.reading.history import History
from lockstep.observe.text import Item, fitted, number

_BRAILLE = 0x2800
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
"""What a dot adds to a braille character, by its row and column in the character."""
_MIN_WIDTH, _MIN_HEIGHT = 8, 2
_MIN_BAR, _MAX_BAR = 10, 40
_MAX_RANKS = 64


def head(run: Watched, width: int, now: float) -> Text:
    """Task, state and progress, ranks, digest, folder, and what cannot be read.

    Args:
        run: the run, whose events need not have been read.
        width: columns.
        now: Unix time.
    """
    summary = run.summary
    left, loss = describe.left(summary, now), describe.newest_loss(summary)
    items = (
        Item(1, describe.shown(summary.task)),
        Item(0, f"step {describe.steps(summary)}"),
        Item(2, left and f"left {left}"),
        Item(3, loss and f"loss {loss}"),
    )
    shown = Text(summary.state, style=f"bold {describe.STYLES.get(summary.state, '')}".rstrip())
    shown.append("  " + fitted(items, max(1, width - len(summary.state) - 2)), style="bold")
    if summary.total_steps:
        shown.append("\n" + describe.bar(summary, max(_MIN_BAR, min(_MAX_BAR, width))), "cyan")
    ranks = cost = ""
    problems = [*summary.problems, *([run.problem] if run.problem else [])]
    if run.is_open:
        ranks = describe.ranks_alive(run.history, summary)
        cost = describe.cost_of_steps(run.history, summary)
        if run.history.num_problems:
            count = text.count(run.history.num_problems, "row")
            problems.append(f"{count} cannot be read, the first: {run.history.problems[0]}")
    ago = text.duration(max(0.0, now - summary.newest))
    age = f"newest event {ago} ago" if summary.newest else "no event yet"
    shown.append("\n" + fitted((Item(0, ranks), Item(1, age)), width))
    if cost:
        shown.append(f"\n{cost}")
    if summary.sha256:
        shown.append(f"\nSHA-256 {describe.shown(summary.sha256)}")
    shown.append(f"\n{describe.shown(str(run.path))}", style="dim")
    for problem in dict.fromkeys(problems):
        shown.append(f"\n{describe.shown(problem)}", style="red")
    return shown


def alerts(on: Sequence[Alert]) -> Text:
    """The alerts of a run that are on."""
    lines = [f"alert {alert.rule}: {alert.message}" for alert in on]
    return Text("\n".join(map(describe.shown, lines)), style="bold yellow")


def curve_names(history: History) -> list[str]:
    """The curves that have points: losses first, then other metrics, then what the engine adds."""
    names = [name for name, curve in history.curves.items() if len(curve.steps)]
    return sorted(names, key=lambda n: ("/" not in n, not n.endswith("/loss"), n))


def curve(
    history: History, names: Sequence[str], name: str, width: int, height: int, logarithmic: bool
) -> Text:
    """A curve below a line with its name, its newest, least and greatest value.

    Args:
        history: events of the run.
        names: names of all curves.
        name: name of the curve to draw; empty if there is none.
        width: columns.
        height: lines.
        logarithmic: whether to draw logarithms.
    """
    if not name:
        return Text("no report yet", style="dim")
    drawn = history.curves[name]
    finite = [value for value in drawn.values if math.isfinite(value)]
    items = (
        Item(0, describe.shown(name)),
        Item(1, f"newest {text.number(drawn.values[-1])}"),
        Item(2, f"least {text.number(min(finite))}" if finite else ""),
        Item(3, f"most {text.number(max(finite))}" if finite else ""),
        Item(4, "logarithmic" if logarithmic else ""),
        Item(5, f"curve {names.index(name) + 1} of {len(names)}"),
    )
    lines = plot(drawn.steps, drawn.values, width, height - 1, logarithmic)
    shown = Text(fitted(items, width), style="bold")
    shown.append("\n" + "\n".join(lines), style="not bold green")
    return shown


def ranks(rows: Sequence[RankRow], width: int, now: float) -> Text:
    """A line for each rank, as wide as fits; the first ranks where there are many.

    Shares of time are of the newest report, and in brackets of the whole session.
    """
    if not rows:
        return Text("no ranks yet", style="dim")
    for columns in (_WIDE, _MEDIUM, _NARROW):
        cells = [_rank_cells(row, now, columns is _NARROW) for row in rows[:_MAX_RANKS]]
        table = [columns, *([by_name[name] for name in columns] for by_name in cells)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
    styles = ["bold", *(describe.STYLES.get(row.state, "") for row in rows)]
    shown = Text()
    for values, style in zip(table, styles, strict=False):
        line = "  ".join(f"{cell:>{room}}" for cell, room in zip(values, widths, strict=True))
        shown.append(set_cell_size(line, width).rstrip() + "\n", style=style)
    for process in [row.process for row in rows if row.process.reason][:_MAX_RANKS]:
        reason = describe.shown(process.reason.partition(";")[0])
        shown.append(f"slot {process.joined.slot}: it {reason}\n", style="red")
    if len(rows) > _MAX_RANKS:
        shown.append(f"and {text.count(len(rows) - _MAX_RANKS, 'other')}\n", style="dim")
    return shown


_WIDE = (
    "rank", "state", "host", "pid", "batches", "compute", "exchange", "data", "saving", "memory",
    "report",
)  # fmt: skip
_MEDIUM = tuple(name for name in _WIDE if name not in ("host", "pid", "report"))
_NARROW = ("rank", "state", "compute", "exchange", "memory")


def _rank_cells(row: RankRow, now: float, only_recent: bool) -> dict[str, str]:
    process, joined = row.process, row.process.joined
    recent, whole = describe.percentages(row.recent), describe.percentages(row.all)
    shares = recent if only_recent else [f"{r} ({w})" for r, w in zip(recent, whole, strict=True)]
    age = text.clock(max(0.0, now - process.reported)) if process.reported else "-"
    times = process.times
    busy = f", {times.device_busy:.0%} busy" if times.device_busy else ""
    return {
        "rank": str(process.rank),
        "state": row.state,
        "host": describe.shown(joined.host),
        "pid": str(joined.pid),
        "batches": f"{process.num_microbatches:g}",
        **dict(zip(("compute", "exchange", "data", "saving"), shares, strict=True)),
        "memory": text.size(times.memory_bytes) + busy if times.memory_bytes else "-",
        "report": age,
    }


def causes(found: Sequence[Cause]) -> Text:
    """The diagnosis; empty if nothing stands out."""
    lines = [line for cause in found for line in (cause.headline, f"  -> {cause.advice}")]
    return Text("".join(f"{describe.shown(line)}\n" for line in lines), style="yellow")


def events(history: History, most: int) -> Text:
    """The newest events, the last one first, with the time of day."""
    shown = Text()
    for happening in reversed(history.happenings[-most:]):
        clock = time.strftime("%m-%d %H:%M:%S", time.localtime(happening.time))
        shown.append(f"{clock}  ", style="dim")
        style = describe.event_style(happening.event)
        shown.append(describe.event_line(happening.event) + "\n", style=style)
    return shown


def plot(
    steps: Sequence[int],
    values: Sequence[float],
    width: int,
    height: int,
    logarithmic: bool = False,
) -> list[str]:
    """A curve as lines of text, with the range of its values and steps beside and below it.

    Of the values that share a column, the stroke covers all from the least to the greatest, so a
    peak of one step is seen among a million. Points that are further apart are joined by straight
    lines. Values that are not finite are left out.

    Args:
        steps: steps of the values, ascending.
        values: as many values.
        width: columns of all lines, with the numbers on the left.
        height: number of lines, with the line of steps at the bottom.
        logarithmic: whether to draw logarithms; values of zero and less are left out.

    Returns:
        `height` lines, none wider than `width`.
    """
    points = np.array(values, dtype=np.float64)
    is_drawn = np.isfinite(points)
    if logarithmic:
        is_drawn &= points > 0
    points, drawn_steps = points[is_drawn], np.array(steps, dtype=np.float64)[is_drawn]
    if not len(points) or height < _MIN_HEIGHT:
        return ["no values that can be drawn"[:width]] + [""] * (height - 1)
    least, most = float(points.min()), float(points.max())
    labels = [number(most), number(least)]
    if least == most or height == _MIN_HEIGHT:
        labels = labels[:1]
    margin = max(map(len, labels)) + 1
    if width - margin < _MIN_WIDTH:
        margin, labels = 0, []
    drawn = np.log10(points) if logarithmic else points
    lines = _characters(dotted(drawn_steps, drawn, 2 * (width - margin), 4 * (height - 1)))
    for line, label in zip((0, -1), labels, strict=False):
        lines[line] = f"{label:>{margin - 1}} {lines[line]}"
    lines = [line.rjust(width) for line in lines]
    first, last = (f"{int(drawn_steps[at]):,}" for at in (0, -1))
    gap = width - margin - len(first) - len(last)
    below = " " * margin + first + " " * gap + last if gap > 0 else last.rjust(width)
    return [*lines, below if len(below) <= width else ""]


def dotted(
    steps: NDArray[np.float64], values: NDArray[np.float64], width: int, height: int
) -> NDArray[np.bool_]:
    """The dots that a curve covers.

    Args:
        steps: ascending float64 [n] with n > 0.
        values: finite float64 [n].
        width: number of dots from the first step to the last.
        height: number of dots from the least value to the greatest.

    Returns:
        bool [height, width]; the first row is the top.
    """
    columns = _scaled(steps, width)
    rows = _scaled(values, height)
    low = np.full(width, height, dtype=np.int64)
    high = np.full(width, -1, dtype=np.int64)
    np.minimum.at(low, columns, rows)
    np.maximum.at(high, columns, rows)
    known = np.flatnonzero(high >= 0)
    between = np.arange(known[0], known[-1] + 1)
    for bound in (low, high):
        bound[between] = np.rint(np.interp(between, known, bound[known]))
    for column in between[1:]:  # no gap between neighbours
        if low[column] > high[column - 1] + 1:
            low[column] = high[column - 1] + 1
        elif high[column] < low[column - 1] - 1:
            high[column] = low[column - 1] - 1
    heights = np.arange(height)[:, None]
    covered: NDArray[np.bool_] = (heights >= low) & (heights <= high)
    return covered[::-1]


def _scaled(values: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Numbers from 0 to `size` - 1, in the middle if all values are equal."""
    # Halves, since the difference of two floats may be more than any float can hold.
    least, most = values.min() / 2, values.max() / 2
    if least == most:
        return np.full(len(values), (size - 1) // 2, dtype=np.int64)
    part = (values / 2 - least) / (most - least)
    scaled: NDArray[np.int64] = np.rint(part * (size - 1)).astype(np.int64)
    return scaled


def _characters(dots: NDArray[np.bool_]) -> list[str]:
    height, width = dots.shape
    cells = dots.reshape(height // 4, 4, width // 2, 2)
    codes = np.einsum("arbc,rc->ab", cells.astype(np.int64), _BITS) + _BRAILLE
    return ["".join(map(chr, row)) for row in codes]
