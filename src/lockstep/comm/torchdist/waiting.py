"""Waiting for transfers of gloo that may never end.

Gloo tells nobody about a transfer of which a part has gone or come when its connection closes
(`Pair::signalException` of gloo/transport/tcp/pair.cc passes over both): who waits for it waits
until the timeout, and so does the destructor of its group. So waits are short here, and between
them there is a look at whether the wait is in vain.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

_LOOK = timedelta(seconds=0.2)

Finish = Callable[[Any, Callable[[], bool]], None]
"""`finish` or `finish_message`."""


class LeftBehind(RuntimeError):
    """A transfer was given up.

    Attributes:
        is_stuck: whether its destructor would still wait for it.
    """

    def __init__(self, is_stuck: Callable[[], bool]) -> None:
        super().__init__("a rank died, or has given the group up")
        self.is_stuck = is_stuck


def finish(work: Any, is_in_vain: Callable[[], bool]) -> None:
    """Wait for a collective of gloo; its error is raised.

    Raises:
        LeftBehind: it has not ended, and is not going to.
    """
    while not _ends_soon(work):
        if is_in_vain() and not work.is_completed():
            raise LeftBehind(lambda: not work.is_completed())


def finish_message(work: Any, is_in_vain: Callable[[], bool]) -> None:
    """As `finish`, for a message to or from one rank."""
    # In a thread, since gloo closes all connections when such a wait takes longer than it may.
    ended = threading.Event()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=wait, name="message", daemon=True).start()
    while not ended.wait(_LOOK.total_seconds()):
        if is_in_vain() and not ended.is_set():
            raise LeftBehind(lambda: not ended.is_set())
    if errors:
        raise errors[0]


def never_destroy(groups: Iterable[Any]) -> None:
    """Keep process groups until the process ends, and longer than Python keeps anything."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _ends_soon(work: Any) -> bool:
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # the error may have been that of the time, and the work have ended since
    return True
