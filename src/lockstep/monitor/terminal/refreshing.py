"""A screen that is brought up to date after each look."""

from __future__ import annotations

from rich.text import Text
from textual.screen import Screen
from textual.widgets import Static

from lockstep.monitor.session import Session


class Refreshing(Screen[None]):
    """A screen of runs, drawn from what the last look has found.

    Args:
        session: the runs.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._texts: dict[str, Text] = {}

    def on_mount(self) -> None:
        """Draw for the first time."""
        self.refresh_shown()

    def on_screen_resume(self) -> None:
        """Draw what has come while another screen was shown."""
        self.refresh_shown()

    def on_resize(self) -> None:
        """Draw anew in the room that there is."""
        self.call_after_refresh(self.refresh_shown)

    def refresh_shown(self) -> None:
        """Draw, unless the runs are being read: then the end of that look will do it."""
        if not self.is_mounted:
            return
        with self._session.free() as is_free:
            if is_free:
                self.draw()

    def draw(self) -> None:
        """Draw; the runs do not change meanwhile."""
        raise NotImplementedError

    def put(self, name: str, shown: Text) -> None:
        """Show a text in one of the screen's fields; nothing is drawn if it is there already."""
        if self._texts.get(name) != shown:
            self._texts[name] = shown
            self.query_one(f"#{name}", Static).update(shown)
