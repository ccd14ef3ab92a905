"""The terminal's screens, and how they come and go."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message

from lockstep.monitor.session import Looker, Session
from lockstep.monitor.terminal.list_screen import ListScreen
from lockstep.monitor.terminal.refreshing import Refreshing
from lockstep.monitor.terminal.run_screen import RunScreen
from lockstep.reading.listing import is_run

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class MonitorApp(App[None]):
    """Runs on a terminal.

    Attributes:
        num_looks: how often what is shown was brought up to date.
        problem: what has ended the looking; None if nothing has.

    Args:
        session: the runs; a thread of its own looks at them.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "lockstep monitor"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    class Looked(Message):
        """The runs have been looked at."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.num_looks = 0
        self.problem: BaseException | None = None
        self._looker = Looker(session, self._tell, self._fail)

    def on_mount(self) -> None:
        """Show the list, or the run if one is asked for, and begin to look."""
        self.push_screen(ListScreen(self.session))
        folders = self.session.watch.folders
        if len(folders) == 1 and is_run(folders[0]):
            self.push_screen(RunScreen(self.session, folders[0]))
        # In a thread that is not the main one (tests) no signal can be taken.
        with suppress(RuntimeError, ValueError):
            for number in _ENDING:
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._looker.start()

    def on_unmount(self) -> None:
        """Look no more."""
        self._looker.end()

    def on_monitor_app_looked(self) -> None:
        """Bring what is shown up to date."""
        if isinstance(self.screen, Refreshing):
            self.screen.refresh_shown()
        self.num_looks += 1

    def raise_problem(self) -> None:
        """Raise what has ended the looking; to be called when the screen is gone."""
        if self.problem is not None:
            raise self.problem

    def _tell(self) -> None:
        self.post_message(self.Looked())

    def _fail(self, error: BaseException) -> None:
        self.problem = error
        self.call_from_thread(self.exit)


def show(session: Session) -> None:
    """Show runs until the user has had enough."""
    app = MonitorApp(session)
    app.run()
    app.raise_problem()
