"""One loop that looks at all runs, for all who watch."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from lockstep.observe.monitor.watch import Watch, Watched
from lockstep.observe.reading.large.rows import Parse
from lockstep.observe.reading.large.run import LargeRun

_SLICE_S = 0.02
_PAUSE_S = 0.002
"""Seconds that a run is read in one go, and that others then have."""
_TELL_S = 0.5
"""Seconds between two notices about a run that is still being read."""
_QUIET_S = 0.15
"""Seconds after a question in which nothing is read in the background: another one may follow."""
_FIRST_S = 0.1
"""Seconds that a run is read before it is first shown."""
_HEARTBEAT_S = 10.0
_MOST_BYTES = 512 << 20
"""Memory of the curves of all runs; the run that nobody has asked for longest is closed beyond."""


class Opened:
    """A run whose events are read."""

    def __init__(self, path: Path, parse: Parse) -> None:
        self.run = LargeRun(path, parse)
        self.asked = self.told = time.monotonic()


class Hub:
    """The runs by their public numbers, and what has changed of them.

    A number is made of the run's path, which nobody from outside names.

    Args:
        watch: the runs.
        parse: makes an object of a line of events.
        interval_s: seconds between two looks at the folders.
        failed: called with what has ended the loop, from its thread.

    Attributes:
        boot: tells one start of the server from another.
    """

    def __init__(
        self,
        watch: Watch,
        parse: Parse,
        interval_s: float,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.boot = secrets.token_hex(8)
        self._interval_s, self._failed = interval_s, failed
        self._watch, self._parse = watch, parse
        self._lock = threading.RLock()
        self._opened: dict[Path, Opened] = {}
        self._version = 0
        self._list_version = 0
        self._versions: dict[str, int] = {}
        self._ended = threading.Event()
        self._awake = threading.Event()
        self._num_clients = 0
        self._asked = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, from the event loop that serves."""
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End looking, and the streams of all who watch; from any thread."""
        self._ended.set()
        self._awake.set()
        self._announce()

    def runs(self) -> list[Watched]:
        """All runs."""
        with self._lock:
            return list(self._watch.runs.values())

    def find(self, number: str) -> Watched | None:
        """The run with a number."""
        return next((run for run in self.runs() if number_of(run.path) == number), None)

    def open(self, path: Path) -> LargeRun:
        """What the events of a run tell, kept up to date from now on."""
        self._asked = time.monotonic()
        with self._lock:
            opened = self._opened.get(path)
            if opened is not None:
                opened.asked = time.monotonic()
                return opened.run
            opened = self._opened[path] = Opened(path, self._parse)
            self._close_others(path)
        opened.run.advance(_FIRST_S)
        self._asked = time.monotonic()
        self._awake.set()  # what is left of it is read before the next look
        return opened.run

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """What has changed, as soon as it has: the first at once, empty ones as a heartbeat."""
        self._num_clients += 1
        self._awake.set()
        seen = -1
        try:
            while not self._ended.is_set():
                news = self._news  # before the versions: what changes after them is news
                assert news is not None
                with self._lock:
                    runs = {number: v for number, v in self._versions.items() if v > seen}
                    is_new = seen < 0 or self._list_version > seen
                    seen = self._version
                yield {"boot": self.boot, "list": is_new, "runs": list(runs)}
                await _wait(news)
        finally:
            self._num_clients -= 1

    def _run(self) -> None:
        try:
            self._look_on()
        except Exception as error:
            self._failed(error)
            self.stop()  # a page whose stream ends says so; one that is told nothing does not

    def _look_on(self) -> None:
        next_look = 0.0
        while not self._ended.is_set():
            if not self._num_clients:
                self._awake.wait(self._interval_s)
                self._awake.clear()
                continue
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + self._interval_s
            if (left := self._asked + _QUIET_S - time.monotonic()) > 0:
                self._ended.wait(left)
                continue
            is_busy = self._read_on()
            self._awake.wait(_PAUSE_S if is_busy else max(0.0, next_look - time.monotonic()))
            self._awake.clear()

    def _look(self) -> None:
        before = set(self._watch.runs)
        changed = self._watch.poll()
        with self._lock:
            gone = before - set(self._watch.runs)
            for path in gone:
                self._opened.pop(path, None)
            opened = list(self._opened.items())
        paths = gone | {run.path for run in changed}
        is_other = bool(paths)
        for path, one in opened:  # without the lock, which the event loop takes
            if one.run.is_whole and one.run.advance(_SLICE_S):
                paths.add(path)
        if paths:
            self._tell(paths, is_other)

    def _read_on(self) -> bool:
        """Read each run that is not read yet for a moment; returns whether there was one."""
        with self._lock:
            opened = [(path, one) for path, one in self._opened.items() if not one.run.is_whole]
        for path, one in opened:
            one.run.advance(_SLICE_S)
            now = time.monotonic()
            if one.run.is_whole or now - one.told > _TELL_S:
                one.told = now
                self._tell({path}, is_list=False)
        return bool(opened)

    def _tell(self, paths: set[Path], is_list: bool) -> None:
        with self._lock:
            self._version += 1
            self._versions |= dict.fromkeys(map(number_of, paths), self._version)
            if is_list:
                self._list_version = self._version
        self._announce()

    def _announce(self) -> None:
        def wake() -> None:
            if self._news is not None:
                waiting, self._news = self._news, asyncio.Event()
                waiting.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(wake)

    def _close_others(self, path: Path) -> None:
        """Close the runs that nobody has asked for longest, while they take too much memory."""
        by_age = sorted(self._opened, key=lambda one: self._opened[one].asked)
        used = sum(one.run.num_bytes for one in self._opened.values())
        for one in by_age:
            if used <= _MOST_BYTES or one == path:
                return
            used -= self._opened.pop(one).run.num_bytes


async def _wait(news: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(news.wait(), _HEARTBEAT_S)
    except (TimeoutError, asyncio.TimeoutError):
        return


def number_of(path: Path) -> str:
    """The public number of a run."""
    return hashlib.sha256(bytes(path)).hexdigest()[:16]
