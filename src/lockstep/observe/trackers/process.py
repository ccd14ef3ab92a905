"""The process of one tracker: lines of JSON in, a library's calls out.

Started by `TrackerSink` as `python -m lockstep.observe.trackers.process NAME FOLDER`. It takes
messages from standard input until that ends, also where the rank that started it was killed, and
reports each kind of error once, as a line on standard output. What the library prints goes to where
standard error goes.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from lockstep.files import open_regular, read_text, replacing
from lockstep.observe.trackers.tracker import Opening, Tracker
from lockstep.parsing import parse_object

_CLASSES = {
    "mlflow": ("mlflow_run", "MlflowRun"),
    "trackio": ("trackio_run", "TrackioRun"),
    "wandb": ("wandb_run", "WandbRun"),
}
_STATE = "state.json"
_SAVE_EVERY_S = 1.0
_OF_PICTURE = "picture: "
"""Before the names of pictures, which metrics may have too."""


class Work:
    """Does what messages ask for; what a tracker has had of a step is not given to it again.

    Steps that are done again after a resume have the same metrics as before. Of those before the
    newest step that the tracker has had it has had all.

    Args:
        make: function that opens a run in a tracker.
        folder: folder of the tracker in the run directory.
    """

    def __init__(self, make: Callable[[Opening], Tracker], folder: Path) -> None:
        self._make = make
        self._folder = folder
        self._tracker: Tracker | None = None
        self._newest = self._known = -1
        self._had: set[str] = set()
        """Names of what the tracker has had of step `_newest`."""
        self._known_of_newest: set[str] = set()
        """Names of what an earlier sitting has given it of step `_known`."""
        self._saved_at = 0.0
        self._status = ""

    def do(self, message: dict[str, Any]) -> None:
        """Do what a message asks for; what comes before `open`, or if that failed, is dropped."""
        kind = message["do"]
        if kind == "open":
            self._open(message)
        elif kind == "end":
            self._status = message["status"]
        elif self._tracker is not None and message["step"] >= self._known:
            self._give(self._tracker, message)
            if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
                self._save()

    def end(self) -> None:
        """Complete the run."""
        if self._tracker is not None:
            try:
                self._tracker.end(self._status)
            finally:
                self._save()

    def _give(self, tracker: Tracker, message: dict[str, Any]) -> None:
        """Give the tracker what it has not had of metrics or a picture."""
        step, is_picture = message["step"], message["do"] == "picture"
        had = self._known_of_newest if step == self._known else set()
        if is_picture:
            names = {_OF_PICTURE + message["name"]} - had
            if names:
                tracker.picture(step, message["name"], Path(message["path"]))
        else:
            values = {name: v for name, v in message["values"].items() if name not in had}
            names = {*values}
            if values:
                tracker.metrics(step, values)
        if step > self._newest:
            self._newest, self._had = step, set()
        if step == self._newest:
            self._had |= names

    def _open(self, message: dict[str, Any]) -> None:
        state: dict[str, Any] = {}
        if (self._folder / _STATE).exists():
            state = parse_object(read_text(self._folder / _STATE))
        run_id = str(state.get("run_id", ""))
        self._known = self._newest = int(state.get("newest", -1))
        self._had = {str(name) for name in state.get("had", ())}
        self._known_of_newest = {*self._had}
        self._tracker = self._make(
            Opening(
                task=message["task"],
                run_dir=Path(message["run_dir"]),
                folder=self._folder,
                params=message["params"],
                run_id=run_id,
            )
        )
        self._save()

    def _save(self) -> None:
        assert self._tracker is not None
        with replacing(self._folder / _STATE) as file:
            state = {"run_id": self._tracker.run_id, "newest": self._newest}
            json.dump({**state, "had": sorted(self._had)}, file)
        self._saved_at = time.monotonic()


def serve(lines: Iterable[bytes], work: Work, report: Callable[[str], None]) -> None:
    """Do what lines ask for, to their end; errors of a kind of message are reported once.

    A last line without an end is what a rank that was killed had not finished: it is dropped.
    """
    failed: set[str] = set()

    def attempt(kind: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:
            if kind not in failed:
                report(f"{type(error).__name__}: {error}")
            failed.add(kind)

    for line in lines:
        if not line.endswith(b"\n"):
            break
        message = json.loads(line)
        attempt(message["do"], partial(work.do, message))
    attempt("close", work.end)


def main(name: str, folder: Path) -> None:
    """Serve one tracker, from standard input."""
    # Ctrl-C and a scheduler's notice go to the whole group; this process ends by its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb") as lines, os.fdopen(os.dup(1), "w") as reports:
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        lock = open_regular(folder / ".lock", os.O_RDWR | os.O_CREAT)
        # The process of a rank that was lost may have something left to write.
        fcntl.flock(lock, fcntl.LOCK_EX)
        serve(lines, Work(lambda opening: _opened(name, opening), folder), _reporter(reports))


def _reporter(reports: TextIO) -> Callable[[str], None]:
    def report(problem: str) -> None:
        print(json.dumps({"problem": problem}), file=reports, flush=True)

    return report


def _opened(name: str, opening: Opening) -> Tracker:
    module, kind = _CLASSES[name]
    found = getattr(importlib.import_module(f"lockstep.observe.trackers.{module}"), kind)
    tracker: Tracker = found(opening)
    return tracker


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
