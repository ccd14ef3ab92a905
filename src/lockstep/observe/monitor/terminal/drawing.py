"""The fields of a run's screen as texts with styles, and curves in braille."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import set_cell_size
from rich.text import Text

from lockstep.observe import text
from lockstep.observe.monitor import describe as telling
from lockstep.observe.monitor.describe import RankRow
from lockstep.observe.monitor.watch import Alert, Watched
from lockstep.observe.reading.diagnosis.facts import Cause
from lockstep.observe.reading.history import History
from lockstep.observe.text import Item, fitted, number

_FIRST = 0x2800
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
"""What a dot adds to a character, by its row and column in the field."""
_LEAST_WIDTH, _LEAST_HEIGHT = 8, 2


def plot(
    steps: Sequence[int],
    values: Sequence[float],
    width: int,
    height: int,
    logarithmic: bool = False,
) -> list[str]:
    """A curve as lines of text, with the range of its values and steps beside and below it.

    Of values that share a column, all are covered by a stroke from the least to the greatest, so
    a peak of one step is seen among a million. Between points that are further apart the stroke
    goes straight. Values that are not finite are left out.

    Args:
        steps: ascending.
        values: as many.
        width: columns of all lines together with the numbers at the left.
        height: number of lines with the one of steps at the bottom.
        logarithmic: whether the values' logarithms are drawn; those of zero and less are left out.

    Returns:
        `height` lines, none wider than `width`.
    """
    points = np.array(values, dtype=np.float64)
    is_drawn = np.isfinite(points)
    if logarithmic:
        is_drawn &= points > 0
    points, places = points[is_drawn], np.array(steps, dtype=np.float64)[is_drawn]
    if not len(points) or height < _LEAST_HEIGHT:
        return ["no values that can be drawn"[:width]] + [""] * (height - 1)
    least, most = float(points.min()), float(points.max())
    labels = [number(most), number(least)]
    if least == most or height == _LEAST_HEIGHT:
        labels = labels[:1]
    margin = max(map(len, labels)) + 1
    if width - margin < _LEAST_WIDTH:
        margin, labels = 0, []
    drawn = np.log10(points) if logarithmic else points
    dots = dotted(places, drawn, 2 * (width - margin), 4 * (height - 1))
    lines = _characters(dots)
    for place, label in zip((0, len(lines) - 1), labels, strict=False):
        lines[place] = f"{label:>{margin - 1}} {lines[place]}"
    lines = [line.rjust(width) for line in lines]
    first, last = f"{int(places[0]):,}", f"{int(places[-1]):,}"
    gap = width - margin - len(first) - len(last)
    below = " " * margin + first + " " * gap + last if gap > 0 else last.rjust(width)
    return [*lines, below if len(below) <= width else ""]


def dotted(
    places: NDArray[np.float64], values: NDArray[np.float64], width: int, height: int
) -> NDArray[np.bool_]:
    """Which dots a curve covers.

    Args:
        places: ascending float64 [n] with n > 0.
        values: finite float64 [n].
        width: number of dots from the first place to the last.
        height: number of dots from the least value to the greatest.

    Returns:
        bool [height, width]; the first row is the top.
    """
    columns = _scaled(places, width)
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
    # Halves, for the difference of two floats may be more than any float can hold.
    least, most = values.min() / 2, values.max() / 2
    if least == most:
        return np.full(len(values), (size - 1) // 2, dtype=np.int64)
    part = (values / 2 - least) / (most - least)
    scaled: NDArray[np.int64] = np.rint(part * (size - 1)).astype(np.int64)
    return scaled


def _characters(dots: NDArray[np.bool_]) -> list[str]:
    height, width = dots.shape
    fields = dots.reshape(height // 4, 4, width // 2, 2)
    codes = np.einsum("arbc,rc->ab", fields.astype(np.int64), _BITS) + _FIRST
    return ["".join(map(chr, row)) for row in codes]


_MOST_RANKS = 64
_LEAST_BAR = 10
_MOST_BAR = 40


def head(run: Watched, width: int, now: float) -> Text:
    """Task, state and progress, ranks, digest, folder, and what cannot be read.

    Args:
        run: of which its events need not be read.
        width: columns.
        now: Unix time.
    """
    summary = run.summary
    left = telling.left(summary, now)
    items = (
        Item(1, telling.shown(summary.task)),
        Item(0, f"step {telling.steps(summary)}"),
        Item(2, left and f"left {left}"),
        Item(3, telling.newest_loss(summary) and f"loss {telling.newest_loss(summary)}"),
    )
    shown = Text(summary.state, style=f"bold {telling.STYLES.get(summary.state, '')}".rstrip())
    shown.append("  " + fitted(items, max(1, width - len(summary.state) - 2)), style="bold")
    if summary.total_steps:
        shown.append("\n" + telling.bar(summary, max(_LEAST_BAR, min(_MOST_BAR, width))), "cyan")
    ranks = telling.ranks_alive(run.history, summary) if run.is_open else ""
    shown.append("\n" + fitted((Item(0, ranks), Item(1, _age(summary.newest, now))), width))
    took = telling.cost_of_steps(run.history, summary) if run.is_open else ""
    if took:
        shown.append(f"\n{took}")
    if summary.sha256:
        shown.append(f"\nSHA-256 {telling.shown(summary.sha256)}")
    shown.append(f"\n{telling.shown(str(run.path))}", style="dim")
    problems = [*summary.problems, *([run.problem] if run.problem else [])]
    if run.is_open and run.history.num_problems:
        count = text.count(run.history.num_problems, "row")
        problems.append(f"{count} cannot be read, the first: {run.history.problems[0]}")
    for problem in dict.fromkeys(problems):
        shown.append(f"\n{telling.shown(problem)}", style="red")
    return shown


def alerts(on: Sequence[Alert]) -> Text:
    """The alerts of a run that are on."""
    lines = [f"alert {alert.rule}: {alert.message}" for alert in on]
    return Text("\n".join(map(telling.shown, lines)), style="bold yellow")


def curve_names(history: History) -> list[str]:
    """The curves that have points: losses first, then other metrics, then what the engine adds."""
    names = [name for name, curve in history.curves.items() if len(curve.steps)]
    return sorted(names, key=lambda n: ("/" not in n, not n.endswith("/loss"), n))


def curve(
    history: History, names: Sequence[str], name: str, width: int, height: int, logarithmic: bool
) -> Text:
    """A curve with a line that says which one, its newest value and its least.

    Args:
        history: what the run's events tell.
        names: of all curves.
        name: of the one to draw; empty if there is none.
        width: columns.
        height: lines.
        logarithmic: whether to draw logarithms.
    """
    if not name:
        return Text("no report yet", style="dim")
    drawn = history.curves[name]
    finite = [value for value in drawn.values if value - value == 0.0]
    items = (
        Item(0, telling.shown(name)),
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
    """A line for each rank: the widest form that fits; the first ranks where there are many.

    Shares of time are of the newest report, and in brackets of the whole session.
    """
    if not rows:
        return Text("no ranks yet", style="dim")
    for columns in (_ALL, _WITHOUT_PROCESS, _ESSENTIAL):
        table = [[name for name, _ in columns]]
        table += [[cell(row, now) for _, cell in columns] for row in rows[:_MOST_RANKS]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
    shown = Text()
    for row_number, cells in enumerate(table):
        line = "  ".join(f"{cell:>{room}}" for cell, room in zip(cells, widths, strict=True))
        style = "bold" if row_number == 0 else telling.STYLES.get(rows[row_number - 1].state, "")
        shown.append(set_cell_size(line, width).rstrip() + "\n", style=style)
    lost = [row for row in rows if row.reason]
    for row in lost[:_MOST_RANKS]:
        shown.append(f"slot {row.slot}: it {telling.shown(row.reason)}\n", style="red")
    if len(rows) > _MOST_RANKS:
        shown.append(f"and {text.count(len(rows) - _MOST_RANKS, 'other')}\n", style="dim")
    return shown


def causes(found: Sequence[Cause]) -> Text:
    """The diagnosis; empty if nothing stands out."""
    lines = [line for cause in found for line in telling.told_cause(cause)]
    return Text("\n".join(lines), style="yellow") + Text("\n" if lines else "")


def events(history: History, most: int) -> Text:
    """What has happened, the newest first, with the time of day."""
    shown = Text()
    for happening in reversed(history.happenings[-most:]):
        clock = time.strftime("%m-%d %H:%M:%S", time.localtime(happening.time))
        shown.append(f"{clock}  ", style="dim")
        style = telling.event_style(happening.event)
        shown.append(telling.told_event(happening) + "\n", style=style)
    return shown


def _age(then: float, now: float) -> str:
    return f"newest event {text.duration(max(0.0, now - then))} ago" if then else "no event yet"


def _shares(kind: int, row: RankRow) -> str:
    """A part of the newest report, and of the whole session in brackets."""
    recent, whole = telling.told_shares(row.recent)[kind], telling.told_shares(row.all)[kind]
    return f"{recent} ({whole})"


_ESSENTIAL = (
    ("rank", lambda row, now: str(row.rank)),
    ("state", lambda row, now: row.state),
    ("compute", lambda row, now: telling.told_shares(row.recent)[0]),
    ("exchange", lambda row, now: telling.told_shares(row.recent)[1]),
    ("memory", lambda row, now: text.size(row.peak_bytes) if row.peak_bytes else "-"),
)
_WITHOUT_PROCESS = (
    *_ESSENTIAL[:2],
    ("batches", lambda row, now: f"{row.num_microbatches:g}"),
    ("compute", lambda row, now: _shares(0, row)),
    ("exchange", lambda row, now: _shares(1, row)),
    ("data", lambda row, now: _shares(2, row)),
    ("saving", lambda row, now: _shares(3, row)),
    _ESSENTIAL[-1],
)
_ALL = (
    *_WITHOUT_PROCESS[:2],
    ("host", lambda row, now: telling.shown(row.host)),
    ("pid", lambda row, now: str(row.pid)),
    *_WITHOUT_PROCESS[2:],
    ("report", lambda row, now: text.clock(max(0.0, now - row.reported)) if row.reported else "-"),
)
