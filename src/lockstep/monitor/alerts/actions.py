"""What is done when an alert comes or goes: a line, a request, a program."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException

from lockstep.monitor.alerts.alert import Alert
from lockstep.monitor.alerts.rules import Action, Rule
from lockstep.monitor.telling import shown

_MOST_WAITING = 1000
"""Alerts that wait for a slow address or program; later ones are passed over."""
_MOST_TOLD = 200


class Actions:
    """Does what rules ask for; requests and programs one after another in a thread.

    A request or program that fails is told once, until it succeeds again. Nothing that it does
    keeps the looking waiting, or ends it.

    Args:
        tell: takes a line for people; called in several threads.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._waiting: queue.Queue[tuple[Action, Alert] | None] = queue.Queue(_MOST_WAITING)
        self._failed: set[Action] = set()
        self._is_full = False
        self._thread = threading.Thread(target=self._work, name="lockstep-alerts", daemon=True)
        self._thread.start()

    def __call__(self, alert: Alert, rule: Rule) -> None:
        """Do all that a rule asks for."""
        for action in rule.do:
            if action.print:
                self._tell(shown(alert.told()))
                continue
            try:
                self._waiting.put_nowait((action, alert))
                self._is_full = False
            except queue.Full:
                if not self._is_full:
                    self._tell(f"alerts: {_MOST_WAITING} wait for an action; others are left out")
                self._is_full = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Do what waits, for as long as there is time."""
        end = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            action, alert = item
            try:
                _run(action, alert)
            except (OSError, HTTPException, ValueError, subprocess.SubprocessError) as error:
                if action not in self._failed:
                    self._failed.add(action)
                    what = action.webhook or " ".join(action.command or ())
                    self._tell(shown(f"alert {alert.rule}: {what}: {_reason(error)}"))
            else:
                self._failed.discard(action)


def as_object(alert: Alert) -> dict[str, str | int | float]:
    """What a webhook gets: the alert's attributes, and a line for people as `text`."""
    return {**vars(alert), "text": alert.told()}


def as_variables(alert: Alert) -> dict[str, str]:
    """The environment variables of a program: `ALERT_RULE`, `ALERT_STATE` and so on.

    Names do not begin with LOCKSTEP_, by which a process knows that it is a rank.
    """
    # A variable cannot hold a NUL, and what is no text in a path goes back to its bytes.
    facts = {name: str(value).replace("\0", "\\x00") for name, value in vars(alert).items()}
    return {f"ALERT_{name.upper()}": value for name, value in facts.items()}


def _run(action: Action, alert: Alert) -> None:
    if action.webhook is not None:
        _post(action.webhook, as_object(alert), action.timeout_s)
    elif action.command is not None:
        _start(action.command, as_variables(alert), action.timeout_s)


def _post(address: str, value: Mapping[str, object], timeout_s: float) -> None:
    """POST a JSON object.

    Raises:
        OSError: nobody answers, or not in time, or with an error's status.
        HTTPException: the answer is no HTTP.
    """
    body = json.dumps(value).encode("ascii")  # escapes what is no text in a path
    headers = {"Content-Type": "application/json", "User-Agent": "lockstep-monitor"}
    request = urllib.request.Request(address, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _start(command: tuple[str, ...], variables: Mapping[str, str], timeout_s: float) -> None:
    """Run a program to its end, or end it with all that it has started when its time is over.

    Raises:
        OSError: it cannot be started.
        SubprocessError: it takes too long, or fails.
    """
    with subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"ended with {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"took more than {error.timeout:g} s, and was ended"
    if isinstance(error, urllib.error.HTTPError):
        return f"answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"cannot be reached: {error.reason}"
    return str(error)[:_MOST_TOLD] or type(error).__name__
