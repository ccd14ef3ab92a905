"""`logged/`: pictures of `lockstep.log`, a folder for each name and a PNG file for each step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.engine.events import PICTURES, Event, Logged, RunStarted, picture_path
from lockstep.files import replacing_binary
from lockstep.observe.sink import Sink

_FILE = re.compile(r"(\d{8,})\.png")
_MOST_KEPT = 16


class Pictures(Sink):
    """Writes each picture as a whole, or not at all; one that comes again takes its place.

    When a run goes on from step k, as `RunStarted` says, pictures of later steps are removed: they
    come again. Of those that cannot be written, the newest few are kept for the next event.

    Args:
        run_dir: path of the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._waiting: dict[str, bytes] = {}

    def __call__(self, event: Event) -> None:
        """Write the picture of a `Logged`; with `RunStarted`, remove those of later steps."""
        if isinstance(event, RunStarted) and not event.continued:
            self._cut(event.step)
        elif isinstance(event, Logged) and event.png:
            if len(self._waiting) >= _MOST_KEPT:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[picture_path(event.name, event.step)] = event.png
        self._write()

    def close(self) -> None:
        """Write what is kept."""
        self._write()

    def _write(self) -> None:
        for path, png in list(self._waiting.items()):
            file = self._run_dir / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing_binary(file) as binary:
                binary.write(png)
            del self._waiting[path]

    def _cut(self, last_step: int) -> None:
        self._waiting.clear()
        for path, step in pictures_of(self._run_dir):
            if step > last_step:
                path.unlink()


def pictures_of(run_dir: Path) -> Iterator[tuple[Path, int]]:
    """The pictures in a run directory, each with its step."""
    for path in (run_dir / PICTURES).rglob("*.png"):
        found = _FILE.fullmatch(path.name)
        if found:
            yield path, int(found[1])
