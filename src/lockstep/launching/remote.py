"""Training in, and reading from, a run directory that is a URL.

Training reads and writes a local copy only, so no step waits for a network. A thread of the process
that holds the run carries over what changes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.engine.checkpoint.listing import IDENTITY
from lockstep.errors import LockstepError, RankFailure, RunDirectoryError
from lockstep.launching.rank.environment import detect
from lockstep.launching.remote_directory import RemoteDirectory, text_of, url_of

if TYPE_CHECKING:
    from lockstep.launching.api import Session

_PAUSE_S = 2.0
_LOOK_S = 5.0
_REST = 4
"""Carrying over takes at most a fifth of the time: it rests four times as long as it took."""
_PATIENCE_S = 60.0
"""How long the end of a run tries to be carried over."""


def local_copy(path: str | Path) -> Path:
    """A folder with what a run directory holds now, to read from.

    Args:
        path: a folder, which is returned as it is, or a URL.

    Raises:
        RunDirectoryError: the URL cannot be read, or has nothing.
    """
    url = url_of(path)
    if url is None:
        return Path(path)
    remote = RemoteDirectory(url, "read")
    remote.fetch(keeps_unsent=False)
    if not (remote.path / IDENTITY).exists():
        raise RunDirectoryError(f"{url}: is no run directory (no {IDENTITY})")
    return remote.path


def local_runs(folder: Path) -> Path:
    """A folder with all runs of a folder, to look at: itself, or copies if it is a URL.

    The copies have no checkpoints.

    Raises:
        RunDirectoryError: the URL cannot be read.
    """
    url = url_of(folder)
    if url is None:
        return folder
    place = RemoteDirectory(url, "look")
    place.path.mkdir(parents=True, exist_ok=True)
    runs = [RemoteDirectory(each, "look") for each in place.runs()]
    for run in runs:
        run.fetch(keeps_unsent=False, with_checkpoints=False)
    paths = {run.path for run in runs}
    for identity in [*place.path.rglob(IDENTITY)]:
        if identity.parent not in paths:  # the run was removed
            identity.unlink()
    return place.path


@contextmanager
def followed(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """Folders as of `local_runs`, whose copies are kept up to date while the block runs.

    Raises:
        RunDirectoryError: a URL cannot be read.
    """
    local = [local_runs(folder) for folder in folders]
    ends = threading.Event()

    def follow() -> None:
        while not ends.wait(_LOOK_S):
            for folder in folders:
                with suppress(RunDirectoryError):  # it may answer again
                    local_runs(folder)

    thread = threading.Thread(target=follow, name="follower", daemon=True)
    if any(url_of(folder) for folder in folders):
        thread.start()
    try:
        yield local
    finally:
        ends.set()


class NotCarriedOver(RunDirectoryError):
    """The end of a run is in its local copy only; a start in the same place goes on from there."""

    exit_code = RankFailure.exit_code


@contextmanager
def carried(session: Session) -> Iterator[Session]:
    """The session with a folder to train in; if its run directory is a URL, that is a local copy.

    What the URL has is fetched first. While the block runs, changes are carried over, and the last
    ones at its end. Of ranks that somebody else has started rank 0 does this; the others have a
    copy of the config and of what the run is.

    Raises:
        RunDirectoryError: the URL cannot be read or written, or another job has taken it over.
    """
    url = url_of(session.run_dir)
    if url is None:
        yield session
        return
    rank = detect(os.environ).rank
    remote = RemoteDirectory(url, f"rank{rank}" if rank else "train", _say)
    session = replace(session, run_dir=str(remote.path), url=url)
    if rank:
        remote.fetch(keeps_unsent=False, with_checkpoints=False)
        yield session
        return
    remote.fetch()
    remote.own()
    carrier = _Carrier(remote)
    carrier.start()
    try:
        yield session
    except BaseException as error:
        if isinstance(error, LockstepError):
            error.args = (str(error).replace(str(remote.path), url),)
        if (failure := carrier.finish()) is not None:
            if carrier.taken_over is failure:
                raise failure from None  # which has ended the run
            print(f"error: {failure}", file=sys.stderr, flush=True)
        raise
    if (failure := carrier.finish()) is not None:
        raise failure


class _Carrier(threading.Thread):
    """Carries changes over in the background, and tries again where it cannot.

    Attributes:
        taken_over: says so, if another job has taken the run directory over.
    """

    def __init__(self, remote: RemoteDirectory) -> None:
        super().__init__(name="carrier", daemon=True)
        self._remote = remote
        self._ends = threading.Event()
        self.taken_over: RunDirectoryError | None = None
        self._problem = ""

    def run(self) -> None:
        pause = _PAUSE_S
        while not self._ends.wait(pause) and self.taken_over is None:
            began = time.monotonic()
            if self._is_sent() and self._problem:
                _say(f"{self._remote.url} is up to date again")
                self._problem = ""
            pause = max(_PAUSE_S, _REST * (time.monotonic() - began))
        if self.taken_over is not None and not self._ends.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # which stops the run with a checkpoint

    def finish(self) -> RunDirectoryError | None:
        """Carry the last changes over; returns why that could not be done."""
        self._ends.set()
        self.join()
        deadline, pause = time.monotonic() + _PATIENCE_S, 0.5
        while self.taken_over is None and not self._is_sent():
            if time.monotonic() + pause > deadline:
                return NotCarriedOver(
                    f"{self._remote.url}: the end of the run could not be carried over: "
                    f"{self._problem}; it is in {self._remote.path}, and the next start in this "
                    "run directory on this host sends it"
                )
            time.sleep(pause)
            pause *= 2
        return self.taken_over

    def _is_sent(self) -> bool:
        try:
            self._remote.send()
            return True
        except RunDirectoryError as error:
            self.taken_over = error
        except Exception as error:
            if not self._problem:
                _say(f"{self._remote.url} cannot be written, training goes on: {text_of(error)}")
            self._problem = text_of(error)
        return False


def _say(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
