"""Alerts that begin and end, and their actions: a line, an HTTP request, a program."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from http.client import HTTPException
from pathlib import Path

from lockstep.observe.monitor.alerts import Action, Rule, Rules
from lockstep.observe.monitor.alerts.conditions import Finding, Look, found_in, found_over
from lockstep.observe.monitor.describe import shown
from lockstep.observe.monitor.watch import Alert, Watch, Watched

_MAX_WAITING = 1000
"""Alerts that wait for a slow address or program; further ones are dropped."""
_MAX_REASON = 200
_ALIVE = ("running", "new")

Key = tuple[str, str, str]
"""The name of a rule, the run (empty for a disk), and the key of the finding."""


@dataclass(frozen=True)
class _Active:
    """A finding that every look has found since some time.

    Attributes:
        since: Unix time of the first of these looks.
        step: step of the run at that look.
        alert: the alert of it; None until the finding has lasted long enough.
    """

    since: float
    step: int
    alert: Alert | None = None


class AlertManager:
    """Evaluates rules at each look.

    Runs that had ended before the first look are checked only by rules with `past`, until they are
    resumed. Where there is a single look, `for_s` and `for_steps` cannot be waited for: every
    finding is an alert at once.

    Args:
        rules: the rules.
        act: called with an alert that begins or ends, and its rule.
        clock: function that returns the Unix time.
        looks_once: whether there is a single look.
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
        self._active: dict[Key, _Active] = {}
        self._alerted: set[Key] = set()
        self._past: set[Path] = set()
        self._is_first = True
        self._steps: dict[str, tuple[int, float]] = {}

    @property
    def on(self) -> Sequence[Alert]:
        """The alerts that are on, the oldest first."""
        return tuple(one.alert for one in self._active.values() if one.alert is not None)

    def __call__(self, watch: Watch, changed: Sequence[Watched]) -> None:
        """Evaluate all rules."""
        runs = list(watch.runs.values())
        now = self._clock()
        self._note(runs, now)
        look = Look(now, self._since, {run: since for run, (_, since) in self._steps.items()})
        found = {
            key: (rule, f) for rule in self._rules.rules for key, f in self._find(rule, runs, look)
        }
        for key, (rule, finding) in found.items():
            self._begin(key, rule, finding, now)
        for key in self._active.keys() - found.keys():
            alert = self._active.pop(key).alert
            if alert is not None:
                rule = next(rule for rule in self._rules.rules if rule.name == alert.rule)
                self._act(replace(alert, state="over", time=now), rule)

    def _note(self, runs: Sequence[Watched], now: float) -> None:
        """Note which runs had ended before, and when the step of each last changed."""
        for run in runs:
            state, path = run.summary.state, str(run.path)
            is_new = path not in self._steps
            if state in _ALIVE:
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
        """All findings of a rule, by their keys."""
        matching = [run for run in runs if _matches(rule, run)]
        for run in matching:
            if rule.past or run.path not in self._past:
                for finding in found_in(rule.when, run, look):
                    key = (rule.name, str(run.path), finding.key)
                    if not (finding.is_past and key in self._alerted):
                        yield key, finding
        for finding in found_over(rule.when, matching):
            is_disk = rule.when.is_of_disk
            if rule.past or is_disk or finding.run.path not in self._past:
                yield (rule.name, "" if is_disk else str(finding.run.path), finding.key), finding

    def _begin(self, key: Key, rule: Rule, finding: Finding, now: float) -> None:
        """Note a finding; it becomes an alert once it has lasted long enough."""
        summary = finding.run.summary
        active = self._active.setdefault(key, _Active(now, summary.step))
        if active.alert is not None:
            return
        lasts = now - active.since >= rule.for_s and summary.step - active.step >= rule.for_steps
        if not (lasts or finding.is_past or self._looks_once):
            return
        alert = Alert(
            rule=rule.name,
            state="on",
            run=str(finding.run.path),
            task=summary.task,
            step=0 if rule.when.is_of_disk else summary.step,
            message=finding.message,
            since=active.since,
            time=now,
        )
        self._active[key] = replace(active, alert=alert)
        self._alerted.add(key)
        self._act(alert, rule)


def _matches(rule: Rule, run: Watched) -> bool:
    return any(fnmatchcase(name, rule.runs) for name in (run.path.name, str(run.path)))


class Actions:
    """Runs the actions of rules; requests and programs one after another in a thread.

    A request or program that fails is reported once, until it succeeds again. No action delays or
    ends the watching.

    Args:
        tell: takes a line for people; called in several threads.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._waiting: queue.Queue[tuple[Action, Alert] | None] = queue.Queue(_MAX_WAITING)
        self._failed: set[Action] = set()
        self._is_full = False
        self._thread = threading.Thread(target=self._work, name="lockstep-alerts", daemon=True)
        self._thread.start()

    def __call__(self, alert: Alert, rule: Rule) -> None:
        """Run or queue all actions of a rule."""
        for action in rule.do:
            if action.print:
                self._tell(shown(alert.line))
                continue
            try:
                self._waiting.put_nowait((action, alert))
                self._is_full = False
            except queue.Full:
                if not self._is_full:
                    self._tell(f"alerts: {_MAX_WAITING} wait for an action; others are left out")
                self._is_full = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Run the actions that wait, for at most `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            action, alert = item
            try:
                if action.webhook is not None:
                    _post(action.webhook, alert, action.timeout_s)
                elif action.command is not None:
                    _start(action.command, alert, action.timeout_s)
            except (OSError, HTTPException, ValueError, subprocess.SubprocessError) as error:
                if action not in self._failed:
                    self._failed.add(action)
                    target = action.webhook or " ".join(action.command or ())
                    self._tell(shown(f"alert {alert.rule}: {target}: {_reason(error)}"))
            else:
                self._failed.discard(action)


def _post(address: str, alert: Alert, timeout_s: float) -> None:
    """POST the alert as a JSON object of its attributes, with a line for people as `text`.

    Raises:
        OSError: there is no answer in time, or one with an error's status.
        HTTPException: the answer is not HTTP.
    """
    # ASCII, since the path of a run may be no Unicode text.
    body = json.dumps({**vars(alert), "text": alert.line}).encode("ascii")
    headers = {"Content-Type": "application/json", "User-Agent": "lockstep-monitor"}
    request = urllib.request.Request(address, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _start(command: tuple[str, ...], alert: Alert, timeout_s: float) -> None:
    """Run a program; after `timeout_s` seconds it is killed with all that it has started.

    Raises:
        OSError: it cannot be started.
        SubprocessError: it takes too long, or fails.
    """
    with subprocess.Popen(
        command,
        env={**os.environ, **as_variables(alert)},
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


def as_variables(alert: Alert) -> dict[str, str]:
    """The environment variables of a program: `ALERT_RULE`, `ALERT_STATE` and so on.

    Their names do not begin with LOCKSTEP_, by which a process knows that it is a rank.
    """
    # A variable cannot contain a NUL. Surrogates in a path become its bytes again.
    facts = {name: str(value).replace("\0", "\\x00") for name, value in vars(alert).items()}
    return {f"ALERT_{name.upper()}": value for name, value in facts.items()}


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"ended with {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"took more than {error.timeout:g} s, and was ended"
    if isinstance(error, urllib.error.HTTPError):
        return f"answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"cannot be reached: {error.reason}"
    return str(error)[:_MAX_REASON] or type(error).__name__
