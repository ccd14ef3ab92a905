"""Alerts that come and go, and what is done then: a line, a request, a program."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from http.client import HTTPException
from pathlib import Path

from lockstep.observe.monitor.alerts.conditions import Finding, Look, found_in, found_over
from lockstep.observe.monitor.alerts.rules import Action, Rule, Rules
from lockstep.observe.monitor.describe import shown
from lockstep.observe.monitor.watch import Alert, Watch, Watched

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


Key = tuple[str, str, str]
"""A rule's name, the run or what is there instead, and the finding's own key."""
_LIVE = ("running", "new")


@dataclass(frozen=True)
class _Held:
    """A finding that a rule has held for since some time.

    Attributes:
        since: Unix time of the first look that found it.
        step: of the run at that look.
        alert: what was told; None as long as it has not held for long enough.
    """

    since: float
    step: int
    alert: Alert | None = None


class Alarms:
    """Tries rules at each look.

    On the first look runs that have ended are noted. They are looked at by rules with `past` only,
    until somebody goes on with them. Where there is a single look, `for_s` and `for_steps` cannot
    be waited for: what holds is told at once.

    Args:
        rules: what is looked for.
        act: called with an alert that has come or gone, and the rule.
        clock: returns Unix time.
        looks_once: whether no other look follows.
    """

    def __init__(
        self,
        rules: Rules,
        act: Callable[[Alert, Rule], None],
        clock: Callable[[], float] = time.time,
        looks_once: bool = False,
    ) -> None:
        self._rules = rules
        self._act = act
        self._clock = clock
        self._looks_once = looks_once
        self._since = clock()
        self._held: dict[Key, _Held] = {}
        self._told: set[Key] = set()
        self._past: set[Path] = set()
        self._is_first = True
        self._steps: dict[str, tuple[int, float]] = {}

    @property
    def on(self) -> Sequence[Alert]:
        """The alerts that are on, the oldest first."""
        return tuple(held.alert for held in self._held.values() if held.alert is not None)

    def __call__(self, watch: Watch, changed: Sequence[Watched]) -> None:
        """Try all rules."""
        runs = list(watch.runs.values())
        now = self._clock()
        self._note(runs, now)
        look = Look(now, self._since, {run: since for run, (_, since) in self._steps.items()})
        found = {
            key: (rule, f) for rule in self._rules.rules for key, f in self._find(rule, runs, look)
        }
        for key, (rule, finding) in found.items():
            self._hold(key, rule, finding, now)
        for key in list(self._held):
            if key not in found:
                self._release(key, now)

    def _note(self, runs: Sequence[Watched], now: float) -> None:
        """Which runs had ended before, and when each has last got a step further."""
        for run in runs:
            state, path = run.summary.state, str(run.path)
            is_new = path not in self._steps
            if state in _LIVE:
                self._past.discard(run.path)
            elif self._is_first or (is_new and run.summary.newest < self._since):
                self._past.add(run.path)
            step = run.summary.step
            if is_new or self._steps[path][0] != step or state != "running":
                since = run.summary.newest if is_new and state == "running" else now
                self._steps[path] = (step, since or now)
        self._steps = {str(run.path): self._steps[str(run.path)] for run in runs}
        self._past &= {run.path for run in runs}
        self._is_first = False

    def _find(
        self, rule: Rule, runs: Sequence[Watched], look: Look
    ) -> Iterator[tuple[Key, Finding]]:
        fitting = [run for run in runs if _fits(rule, run)]
        watched = [run for run in fitting if rule.past or run.path not in self._past]
        for run in watched:
            for finding in found_in(rule.when, run, look):
                key = (rule.name, str(run.path), finding.key)
                if not (finding.is_past and key in self._told):
                    yield key, finding
        live = {str(run.path) for run in fitting if run.summary.state == "running"}
        for finding in found_over(rule.when, fitting, live):
            is_disk = rule.when.is_of_disk
            if rule.past or is_disk or finding.run.path not in self._past:
                yield (rule.name, "" if is_disk else str(finding.run.path), finding.key), finding

    def _hold(self, key: Key, rule: Rule, finding: Finding, now: float) -> None:
        summary = finding.run.summary
        held = self._held.setdefault(key, _Held(now, summary.step))
        if held.alert is not None:
            return
        is_long = now - held.since >= rule.for_s and summary.step - held.step >= rule.for_steps
        if not (is_long or finding.is_past or self._looks_once):
            return
        alert = Alert(
            rule=rule.name,
            state="on",
            run=str(finding.run.path),
            task=summary.task,
            step=0 if rule.when.is_of_disk else summary.step,
            message=finding.message,
            since=held.since,
            time=now,
        )
        self._held[key] = replace(held, alert=alert)
        self._told.add(key)
        self._act(alert, rule)

    def _release(self, key: Key, now: float) -> None:
        alert = self._held.pop(key).alert
        if alert is not None:
            rule = next(rule for rule in self._rules.rules if rule.name == alert.rule)
            self._act(replace(alert, state="over", time=now), rule)


def _fits(rule: Rule, run: Watched) -> bool:
    names = (run.path.name, str(run.path), run.path.as_posix())
    return any(fnmatchcase(name, rule.runs) for name in names)
