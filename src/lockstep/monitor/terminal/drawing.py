"""The fields of a run's screen, as texts with styles."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import set_cell_size
from rich.text import Text

from lockstep.monitor import telling
from lockstep.monitor.alerts.alert import Alert
from lockstep.monitor.telling import RankRow
from lockstep.monitor.terminal.plot import plot
from lockstep.monitor.watch import Watched
from lockstep.observe import text
from lockstep.observe.layout import Item, fitted
from lockstep.reading.diagnosis.cause import Cause
from lockstep.reading.history import History

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

    Shares of time are of the newest report, and in brackets of the whole sitting.
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
    for number, cells in enumerate(table):
        line = "  ".join(f"{cell:>{room}}" for cell, room in zip(cells, widths, strict=True))
        style = "bold" if number == 0 else telling.STYLES.get(rows[number - 1].state, "")
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
    """A part of the newest report, and of the whole sitting in brackets."""
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
