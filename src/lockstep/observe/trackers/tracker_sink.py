"""A sink that feeds a tracker in a process of its own, and never waits for it while training."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.parsing import parse_object, shown
from lockstep.engine.events import Event, Failed, Finished, Logged, RunStarted, picture_path
from lockstep.errors import ConfigError
from lockstep.observe.sink import Sink
from lockstep.observe.storing.files import opening
from lockstep.observe.storing.rows import scalars_of
from lockstep.observe.trackers import FOLDER, PACKAGES

_MOST_WAITING = 10_000
_END_S = 60.0
_PLACES = ("LOCKSTEP_", "OMPI_", "PMI_", "PMIX_")
"""Prefixes of variables that tell a rank its place, which the tracker's process does not have."""


class TrackerSink(Sink):
    """Hands what curves are made of, and pictures, to a tracker.

    What is logged at a step goes along with the next event of another kind. So it is handed over
    before a checkpoint of that step is on disk: a run resumed from it would not log it again.

    What it may fail with becomes an `OSError`, once, when the next event comes. If the tracker is
    slower than training, messages wait, up to a bound; what comes beyond is lost.

    Args:
        name: of the tracker.
        run_dir: path of the run directory.
        params: keys of the config with their values.
        command: command that serves a tracker; by default that of the tracker's name.
        end_s: seconds that closing waits for what is left to be taken.

    Raises:
        ConfigError: the tracker's package is not installed.
        RunDirectoryError: its folder cannot be made.
    """

    def __init__(
        self,
        name: str,
        run_dir: Path,
        params: Mapping[str, Any],
        *,
        command: Sequence[str] = (),
        end_s: float = _END_S,
    ) -> None:
        if not command and importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"trackers={shown([name])}: the package {PACKAGES[name]} is not installed; "
                f'pip install "lockstep-train[{name}]"'
            )
        self._name, self._run_dir, self._params, self._end_s = name, run_dir, params, end_s
        self._row: dict[str, float] = {}
        self._step = -1
        self._is_open = self._is_told = False
        self._problem = ""
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        folder = run_dir / FOLDER / name
        module = [sys.executable, "-m", "lockstep.observe.trackers.process"]
        with opening(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "output.log").open("ab") as output:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    [*(command or module), name, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env={k: v for k, v in os.environ.items() if not k.startswith(_PLACES)},
                )
        self._threads = [
            threading.Thread(target=target, args=(self._process,), daemon=True)
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, event: Event) -> None:
        """Queue what the tracker is to have of an event.

        Raises:
            OSError: the tracker has failed, once.
        """
        if self._row and event.step != self._step:
            self._end_row()
        if isinstance(event, RunStarted) and not self._is_open:
            self._is_open = True
            about = {"task": event.task, "run_dir": str(self._run_dir), "params": self._params}
            self._put({"do": "open", **about})
        elif isinstance(event, (Finished, Failed)):
            self._end_row()
            status = event.status if isinstance(event, Finished) else "failed"
            self._put({"do": "end", "status": status})
        elif isinstance(event, Logged) and event.png:
            path = str(self._run_dir / picture_path(event.name, event.step))
            self._put({"do": "picture", "step": event.step, "name": event.name, "path": path})
        else:
            values = scalars_of(event)
            self._row |= values
            self._step = event.step if values else self._step
            if not isinstance(event, Logged):
                self._end_row()
        self._tell()

    def close(self) -> None:
        """Let the tracker take what is left, and wait for that up to a bound.

        Raises:
            OSError: it has failed, or has not taken all.
        """
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + self._end_s
        self._end_row()
        try:
            self._messages.put(None, timeout=self._end_s)
            process.wait(max(0.1, deadline - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            self._problem = self._problem or f"has not taken all within {self._end_s:g} s"
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join(1.0)
        if process.returncode:
            self._problem = self._problem or f"its process ended with {process.returncode}"
        self._tell()

    def _end_row(self) -> None:
        row, self._row = self._row, {}
        if row:
            self._put({"do": "metrics", "step": self._step, "values": row})

    def _put(self, message: dict[str, Any]) -> None:
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._problem = self._problem or "is slower than training: some values are lost"

    def _tell(self) -> None:
        if self._problem and not self._is_told:
            self._is_told = True
            log = self._run_dir / FOLDER / self._name / "output.log"
            raise OSError(f"tracker {self._name}: {self._problem} (see {log})")

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        """Write messages to the process until there are no more; called in a thread."""
        assert process.stdin is not None
        is_broken = False
        while (message := self._messages.get()) is not None:
            try:
                if not is_broken:
                    process.stdin.write(json.dumps(message).encode() + b"\n")
                    process.stdin.flush()
            except (OSError, ValueError) as error:
                is_broken = True
                self._problem = self._problem or f"its process does not read: {error}"
        try:
            process.stdin.close()
        except OSError as error:
            self._problem = self._problem or f"its process does not read: {error}"

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        """Take note of the first problem that the process reports; called in a thread."""
        assert process.stdout is not None
        with process.stdout as reports:
            for line in reports:
                said = line.decode(errors="replace").strip()
                with suppress(ValueError):
                    said = str(parse_object(line).get("problem", said))
                self._problem = self._problem or said
