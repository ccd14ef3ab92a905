"""The screen of one run, brought up to date after each look."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from lockstep.observe.monitor import describe
from lockstep.observe.monitor.terminal import drawing
from lockstep.observe.monitor.watch import Monitor, Watched


class Refreshing(Screen[None]):
    """A screen of runs, drawn from what the last look found.

    Args:
        monitor: the runs.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self._monitor = monitor
        self._texts: dict[str, Text] = {}

    def on_mount(self) -> None:
        """Draw for the first time."""
        self.refresh_shown()

    def on_screen_resume(self) -> None:
        """Draw what has changed while another screen was shown."""
        self.refresh_shown()

    def on_resize(self) -> None:
        """Draw again in the new size."""
        self.call_after_refresh(self.refresh_shown)

    def refresh_shown(self) -> None:
        """Draw, unless the runs are being read: the end of that look will do it then."""
        if not self.is_mounted:
            return
        with self._monitor.free() as is_free:
            if is_free:
                self.draw()

    def draw(self) -> None:
        """Draw; the runs do not change while this is called."""
        raise NotImplementedError

    def put(self, name: str, shown: Text) -> None:
        """Show a text in one of the screen's fields, unless it is shown already."""
        if self._texts.get(name) != shown:
            self._texts[name] = shown
            self.query_one(f"#{name}", Static).update(shown)


_MIN_PLOT, _MAX_PLOT = 6, 18


class RunScreen(Refreshing):
    """A run: its progress, a curve, its ranks, its events, and the diagnosis.

    Args:
        monitor: the runs.
        path: folder of the run.
    """

    CSS = """
    RunScreen VerticalScroll { height: 1fr; }
    RunScreen Static { height: auto; padding: 0 1; }
    RunScreen #plot { padding: 0 1 1 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "back", "back"),
        Binding("right,n", "metric(1)", "next curve"),
        Binding("left,p", "metric(-1)", "previous", show=False),
        Binding("l", "logarithmic", "log"),
        Binding("up,k", "scroll(-1)", "scroll", show=False),
        Binding("down,j", "scroll(1)", "scroll", show=False),
    ]

    def __init__(self, monitor: Monitor, path: Path) -> None:
        super().__init__(monitor)
        self._path = path
        self._metric = ""
        self._names: list[str] = []
        self._is_logarithmic = False
        self._recent = describe.RecentShares()
        monitor.want(path)

    def compose(self) -> ComposeResult:
        """Fields from top to bottom, in one area that scrolls, and the keys."""
        with VerticalScroll(can_focus=False):
            for name in ("head", "alerts", "plot", "ranks", "causes", "events"):
                yield Static(id=name, markup=False)
        yield Footer()

    def on_unmount(self) -> None:
        """Release its events, unless others read them too."""
        self._monitor.leave(self._path)

    def draw(self) -> None:
        """Draw all fields; those of a run that is gone stay as they were."""
        run = self._monitor.watch.runs.get(self._path)
        if run is None:
            self.put("head", Text(f"{describe.shown(str(self._path))}: is gone", style="red"))
            return
        width = max(1, self.size.width - 4)
        self.put("head", drawing.head(run, width, time.time()))
        alerts = [a for a in self._monitor.alerts() if a.run == str(self._path)]
        self.put("alerts", drawing.alerts(alerts))
        if not run.is_open:
            self.put("events", Text("reading its events …", style="dim"))
            return
        self._draw_opened(run, width)

    def action_back(self) -> None:
        """Go back to the list."""
        self.dismiss()

    def action_metric(self, by: int) -> None:
        """Show the next or previous curve."""
        if self._names:
            index = self._names.index(self._metric) if self._metric in self._names else 0
            self._metric = self._names[(index + by) % len(self._names)]
            self.refresh_shown()

    def action_logarithmic(self) -> None:
        """Switch between values and their logarithms."""
        self._is_logarithmic = not self._is_logarithmic
        self.refresh_shown()

    def action_scroll(self, by: int) -> None:
        """Move the area up or down."""
        self.query_one(VerticalScroll).scroll_relative(y=2 * by, animate=False)

    def _draw_opened(self, run: Watched, width: int) -> None:
        history = run.history
        self._names = drawing.curve_names(history)
        if self._metric not in self._names:
            self._metric = self._names[0] if self._names else ""
        height = min(_MAX_PLOT, max(_MIN_PLOT, self.size.height // 3))
        curve = drawing.curve(
            history, self._names, self._metric, width, height, self._is_logarithmic
        )
        self.put("plot", curve)
        is_running = run.summary.state == "running"
        rows = describe.rank_rows(history, is_running, self._recent)
        self.put("ranks", drawing.ranks(rows, width, time.time()))
        self.put("causes", drawing.causes(run.causes()))
        self.put("events", drawing.events(history, max(8, self.size.height // 2)))
