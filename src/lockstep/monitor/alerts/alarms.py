"""Alerts that come and go: each is told once when it begins and once when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from lockstep.monitor.alerts.alert import Alert
from lockstep.monitor.alerts.conditions import Finding, Look, found_in, found_over
from lockstep.monitor.alerts.rules import Rule, Rules
from lockstep.monitor.watch import Watch, Watched

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
                self._let_go(key, now)

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

    def _let_go(self, key: Key, now: float) -> None:
        alert = self._held.pop(key).alert
        if alert is not None:
            rule = next(rule for rule in self._rules.rules if rule.name == alert.rule)
            self._act(replace(alert, state="over", time=now), rule)


def _fits(rule: Rule, run: Watched) -> bool:
    names = (run.path.name, str(run.path), run.path.as_posix())
    return any(fnmatchcase(name, rule.runs) for name in names)
