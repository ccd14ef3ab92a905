"""One thread that watches all runs for everybody who has the page open."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.observe.monitor.watch import Watch, Watched
from lockstep.observe.monitor.web.views import run_id
from lockstep.observe.reading.large.rows import Parse
from lockstep.observe.reading.large.run import LargeRun

_SLICE_S = 0.02
"""Seconds that a run is read at a stretch."""
_PAUSE_S = 0.002
"""Seconds between two slices, in which requests get the lock."""
_NOTIFY_S = 0.5
"""Seconds between two notices about a run that is still being read."""
_QUIET_S = 0.15
"""Seconds after a request in which nothing is read in the background: another one may follow."""
_FIRST_S = 0.1
"""Seconds that a run is read before it is first shown."""
_HEARTBEAT_S = 10.0
_MAX_BYTES = 512 << 20
"""Memory of the curves of all runs; beyond it, those that were requested longest ago are closed."""


class _OpenRun:
    """A run whose events are read, and when it was last requested and announced."""

    def __init__(self, path: Path, parse: Parse) -> None:
        self.run = LargeRun(path, parse)
        self.requested_at = self.announced_at = time.monotonic()


class Hub:
    """The runs by their ids, and which of them have changed.

    Args:
        watch: the runs.
        parse: function that parses a line of events.
        interval_s: seconds between two looks at the folders.
        failed: called with the exception that has ended the thread, from that thread.

    Attributes:
        boot: a random name that tells one start of the server from another.
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
        self._open: dict[Path, _OpenRun] = {}
        self._version = 0
        self._list_version = 0
        self._versions: dict[str, int] = {}
        self._ended = threading.Event()
        self._awake = threading.Event()
        self._num_clients = 0
        self._requested_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    def start(self) -> None:
        """Begin to watch, from the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="monitor", daemon=True).start()

    def stop(self) -> None:
        """End watching and all streams of changes; from any thread."""
        self._ended.set()
        self._awake.set()
        self._announce()

    def runs(self) -> list[Watched]:
        """All runs."""
        with self._lock:
            return list(self._watch.runs.values())

    def find(self, id: str) -> Watched | None:
        """The run with an id."""
        return next((run for run in self.runs() if run_id(run.path) == id), None)

    def open(self, path: Path) -> LargeRun:
        """The events of a run, which are kept up to date from now on."""
        self._requested_at = time.monotonic()
        with self._lock:
            opened = self._open.get(path)
            if opened is not None:
                opened.requested_at = time.monotonic()
                return opened.run
            opened = self._open[path] = _OpenRun(path, self._parse)
            self._close_others(path)
        opened.run.advance(_FIRST_S)
        self._requested_at = time.monotonic()
        self._awake.set()  # the rest of it is read before the next look
        return opened.run

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """Changes as they come: the first at once, empty ones as a heartbeat."""
        self._num_clients += 1
        self._awake.set()
        seen = -1
        try:
            while not self._ended.is_set():
                news = self._news  # before the versions: what changes after them sets it
                with self._lock:
                    runs = [id for id, version in self._versions.items() if version > seen]
                    is_new = seen < 0 or self._list_version > seen
                    seen = self._version
                yield {"boot": self.boot, "list": is_new, "runs": runs}
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(news.wait(), _HEARTBEAT_S)
        finally:
            self._num_clients -= 1

    def _run(self) -> None:
        try:
            self._watch_on()
        except Exception as error:
            self._failed(error)
            self.stop()  # a page says so when its stream ends; without, it would seem up to date

    def _watch_on(self) -> None:
        next_look = 0.0
        while not self._ended.is_set():
            if not self._num_clients:
                self._awake.wait(self._interval_s)
                self._awake.clear()
                continue
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + self._interval_s
            if (left := self._requested_at + _QUIET_S - time.monotonic()) > 0:
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
                self._open.pop(path, None)
            opened = list(self._open.items())
        paths = gone | {run.path for run in changed}
        is_list = bool(paths)
        for path, one in opened:  # without the lock, which the event loop takes
            if one.run.is_whole and one.run.advance(_SLICE_S):
                paths.add(path)
        if paths:
            self._notify(paths, is_list)

    def _read_on(self) -> bool:
        """Read a slice of each run that is not read to its end; returns whether there was one."""
        with self._lock:
            opened = [(path, one) for path, one in self._open.items() if not one.run.is_whole]
        for path, one in opened:
            one.run.advance(_SLICE_S)
            now = time.monotonic()
            if one.run.is_whole or now - one.announced_at > _NOTIFY_S:
                one.announced_at = now
                self._notify({path}, is_list=False)
        return bool(opened)

    def _notify(self, paths: set[Path], is_list: bool) -> None:
        with self._lock:
            self._version += 1
            self._versions |= dict.fromkeys(map(run_id, paths), self._version)
            if is_list:
                self._list_version = self._version
        self._announce()

    def _announce(self) -> None:
        def wake() -> None:
            waiting, self._news = self._news, asyncio.Event()
            waiting.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(wake)

    def _close_others(self, path: Path) -> None:
        """Close the runs that were requested longest ago, while all take too much memory."""
        by_age = sorted(self._open, key=lambda one: self._open[one].requested_at)
        used = sum(one.run.num_bytes for one in self._open.values())
        for one in by_age:
            if used <= _MAX_BYTES or one == path:
                return
            used -= self._open.pop(one).run.num_bytes
