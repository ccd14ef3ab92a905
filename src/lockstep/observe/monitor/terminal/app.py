"""The app of `lockstep monitor` on a terminal: the list of runs, and how its screens open."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable, Footer, Input, Static

from lockstep.errors import ConfigError
from lockstep.observe import text
from lockstep.observe.monitor import describe
from lockstep.observe.monitor.terminal.run_screen import Refreshing, RunScreen
from lockstep.observe.monitor.watch import Monitor, MonitorThread
from lockstep.observe.reading.listing import Summary, chosen, is_run

ORDERS = ("-started", "-newest", "name", "state", "-step", "train/loss", "val/loss")
"""Keys that the list can be sorted by."""
_COLUMNS = ("run", "state", "steps", "progress", "left", "loss", "ranks", "tags")
_BAR = 10
_MAX_NOTES = 3
_MAX_ALERTS = 5


class ListScreen(Refreshing):
    """All runs, a row for each; Enter opens one.

    Args:
        monitor: the runs.
    """

    CSS = """
    ListScreen > #title { height: auto; }
    ListScreen > DataTable { height: 1fr; }
    ListScreen > #problem { height: auto; }
    ListScreen > #filter { display: none; }
    ListScreen > #filter.asked { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "open", "open"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("escape", "leave", "leave filter", show=False),
    ]

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(monitor)
        self._order = 0
        self._conditions: list[str] = []
        self._shown: dict[str, list[Text]] = {}

    def compose(self) -> ComposeResult:
        """Title, table, problem with the conditions, field for them, keys."""
        yield Static(id="title", markup=False)
        yield DataTable(id="runs", cursor_type="row", zebra_stripes=True)
        yield Static(id="problem", markup=False)
        yield Input(placeholder="state=running val/loss<0.3", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Add the columns; Textual then calls the base class's handler, which draws."""
        for name in _COLUMNS:
            self._table.add_column(name, key=name)
        self._table.focus()

    def draw(self) -> None:
        """Title and rows."""
        watch, now = self._monitor.watch, time.time()
        summaries = [run.summary for run in watch.runs.values()]
        runs = self._chosen(summaries)
        self.put("title", self._title(summaries, runs))
        rows = {str(run.path): _cells(run, watch.folders, now) for run in runs}
        if list(rows) == list(self._shown):
            self._update(rows)
        else:
            self._replace(rows)
        self._shown = rows

    def action_open(self) -> None:
        """Show the run under the cursor."""
        keys = list(self._shown)
        if keys and self._table.cursor_row < len(keys):
            self.app.push_screen(RunScreen(self._monitor, Path(keys[self._table.cursor_row])))

    def on_data_table_row_selected(self) -> None:
        """Show a run that was selected by Enter or the mouse."""
        self.action_open()

    def action_filter(self) -> None:
        """Show the field for conditions."""
        field = self.query_one("#filter", Input)
        field.add_class("asked")
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Use the conditions."""
        self._conditions = event.value.split()
        self.action_leave()
        self.refresh_shown()

    def action_leave(self) -> None:
        """Hide the field for conditions."""
        self.query_one("#filter", Input).remove_class("asked")
        self._table.focus()

    def action_sort(self) -> None:
        """Sort by the next key."""
        self._order = (self._order + 1) % len(ORDERS)
        self.refresh_shown()

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    def _chosen(self, summaries: Sequence[Summary]) -> list[Summary]:
        order = ORDERS[self._order]
        try:
            runs = chosen(summaries, self._conditions, order)
        except ConfigError as error:
            problem = describe.shown(str(error).removeprefix("--where "))
            self.put("problem", Text(problem, style="red"))
            return chosen(summaries, [], order)
        self.put("problem", Text())
        return runs

    def _title(self, summaries: Sequence[Summary], runs: Sequence[Summary]) -> Text:
        running = sum(run.state == "running" for run in summaries)
        parts = [f"{text.count(len(summaries), 'run')}, {running} running"]
        if not summaries:
            folders = ", ".join(map(str, self._monitor.watch.folders))
            parts = [f"no runs in {describe.shown(folders)} yet"]
        if self._conditions:
            parts.append(f"{len(runs)} with {describe.shown(' '.join(self._conditions))}")
        parts.append(f"by {ORDERS[self._order]}")
        title = Text("  ".join(parts), style="bold")
        on = self._monitor.alerts()
        for alert in on[-_MAX_ALERTS:]:
            title.append(f"\n{describe.shown(alert.line)}", style="yellow")
        if len(on) > _MAX_ALERTS:
            others = text.count(len(on) - _MAX_ALERTS, "older alert")
            title.append(f"\nand {others}", style="yellow")
        for note in list(self._monitor.notes)[-_MAX_NOTES:]:
            title.append(f"\n{describe.shown(note)}", style="not bold dim")
        return title

    def _update(self, rows: dict[str, list[Text]]) -> None:
        pairs = zip(rows.values(), self._shown.values(), strict=True)
        for row, (cells, before) in enumerate(pairs):
            for column, cell in enumerate(cells):
                if cell != before[column]:
                    self._table.update_cell_at(Coordinate(row, column), cell, update_width=True)

    def _replace(self, rows: dict[str, list[Text]]) -> None:
        table = self._table
        keys = list(self._shown)
        under = keys[table.cursor_row] if table.cursor_row < len(keys) else ""
        table.clear()
        for key, cells in rows.items():
            table.add_row(*cells, key=key)
        if under in rows:
            table.move_cursor(row=list(rows).index(under))


def _cells(run: Summary, folders: Sequence[Path], now: float) -> list[Text]:
    values = (
        describe.name_of(run.path, folders), run.state, describe.steps(run),
        describe.bar(run, _BAR), describe.left(run, now), describe.newest_loss(run),
        str(run.ranks or ""), describe.shown(" ".join(run.tags)),
    )  # fmt: skip
    styles = {"state": describe.STYLES.get(run.state, "")}
    return [
        Text(value, style=styles.get(name, ""), no_wrap=True)
        for name, value in zip(_COLUMNS, values, strict=True)
    ]


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class MonitorApp(App[None]):
    """Runs on a terminal.

    Attributes:
        monitor: the runs.
        num_looks: how often the screen was brought up to date.
        problem: the exception that has ended the watching; None if there is none.

    Args:
        monitor: the runs, which a thread reads.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "lockstep monitor"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    class Looked(Message):
        """The runs have been looked at."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor
        self.num_looks = 0
        self.problem: BaseException | None = None
        self._thread = MonitorThread(monitor, lambda: self.post_message(self.Looked()), self._fail)

    def on_mount(self) -> None:
        """Show the list, or the run if there is only one, and start the thread."""
        self.push_screen(ListScreen(self.monitor))
        folders = self.monitor.watch.folders
        if len(folders) == 1 and is_run(folders[0]):
            self.push_screen(RunScreen(self.monitor, folders[0]))
        # Signals can be handled in the main thread only, where tests may not be.
        with suppress(RuntimeError, ValueError):
            for number in _ENDING:
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._thread.start()

    def on_unmount(self) -> None:
        """End the thread."""
        self._thread.end()

    def on_monitor_app_looked(self) -> None:
        """Bring what is shown up to date."""
        if isinstance(self.screen, Refreshing):
            self.screen.refresh_shown()
        self.num_looks += 1

    def raise_problem(self) -> None:
        """Raise the exception that has ended the watching; call it once the screen is closed."""
        if self.problem is not None:
            raise self.problem

    def _fail(self, error: BaseException) -> None:
        self.problem = error
        self.call_from_thread(self.exit)


def show(monitor: Monitor) -> None:
    """Show runs until the user quits."""
    app = MonitorApp(monitor)
    app.run()
    app.raise_problem()
