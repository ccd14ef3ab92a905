"""Position and history of a run: all of its state that is not tensors."""

from __future__ import annotations

import math
from collections.abc import Collection
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config import TrainConfig
from lockstep.config.parsing import as_type
from lockstep.errors import ConfigError, shared

ALL_STEPS = "all steps done"
"""Why a run is over that has come to its last step."""


@dataclass
class Progress:
    """Position and history, as kept in a checkpoint.

    Attributes:
        step: number of committed optimizer steps.
        evaluated: step of the newest evaluation; 0 before the first.
        best: best value so far of the watched metric; None before the first evaluation.
        best_step: step of the evaluation with that value; 0 before the first.
        stale: number of evaluations since then.
        decays: number of decays of the learning rate so far (`schedule.name=plateau`).
        recent: newest values of the metrics whose convergence ends the run, by name.
        metrics: values of the newest evaluation of each split, by "split/name".
        arrays: metrics of more than one number of these evaluations, by "split/name".
        before_last: the same as it was before the evaluation after the last step, where that came
            for no other reason than that the step is the last; else None.
        trained: means of the newest report of training, by name.
        finished: reason for which the run is over; empty while it is not.
        ended_by_loop: whether `Step.stop` gave that reason.
    """

    step: int = 0
    evaluated: int = 0
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    decays: int = 0
    recent: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    finished: str = ""
    arrays: dict[str, Any] = field(default_factory=dict)
    before_last: Progress | None = None
    trained: dict[str, float] = field(default_factory=dict)
    ended_by_loop: bool = False

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, values: dict[str, Any]) -> Progress:
        """The inverse of `state_dict`.

        Raises:
            ValueError: names a field that is missing, unknown, or of another type.
        """
        return as_type(cls, values)

    def problem(self) -> str:
        """Which field has a value that no run can have, and why; empty if none has."""
        if self.step < 0:
            return f"step={self.step}: is less than 0"
        if not 0 <= self.evaluated <= self.step:
            return f"evaluated={self.evaluated}: is not between 0 and step={self.step}"
        if not 0 <= self.best_step <= self.evaluated:
            return f"best_step={self.best_step}: is not between 0 and evaluated={self.evaluated}"
        if (self.best is None) != (self.best_step == 0):
            return f"best={self.best}: cannot be that of best_step={self.best_step}"
        if self.best is not None and math.isnan(self.best):
            return f"best={self.best}: cannot be the best"
        # An evaluation comes after each step at most.
        for name, count in (("stale", self.stale), ("decays", self.decays)):
            if not 0 <= count <= self.evaluated:
                return f"{name}={count}: is not between 0 and evaluated={self.evaluated}"
        if self.ended_by_loop and not self.finished:
            return "ended_by_loop=True: but finished is empty"
        if self.before_last is not None:
            if self.before_last.step != self.step or self.evaluated != self.step:
                return f"before_last: is not of the evaluation after step={self.step}"
            return self.before_last.problem()
        return ""

    def judge(self, config: TrainConfig, metrics: dict[str, float]) -> bool:
        """Record an evaluation; returns whether it is the best so far.

        Raises:
            ConfigError: there is no such metric as `config.watch`, or one of `config.convergence`.
        """
        check_watched(config, metrics)
        self.evaluated = self.step
        for name in {rule.metric for rule in config.convergence}:
            longest = max(rule.window for rule in config.convergence if rule.metric == name)
            self.recent[name] = [*self.recent.get(name, ()), metrics[name]][-longest:]
        value = metrics[config.watch]
        sign = 1.0 if config.watch_mode == "max" else -1.0
        gain = -math.inf if math.isnan(value) else math.inf
        if self.best is not None and not math.isnan(value):
            gain = sign * (value - self.best)
        if gain > config.early_stopping.min_delta:
            self.best, self.best_step, self.stale = value, self.step, 0
            return True
        self.stale += 1
        self.decays += self.stale % (config.schedule.patience + 1) == 0
        return False

    def keep_before_last(self) -> None:
        """Keep this state before an evaluation that a longer run would not have."""
        self.before_last = None
        self.before_last = deepcopy(self)

    def exhausted(self, config: TrainConfig) -> str:
        """Why early stopping or convergence ends the run; empty if they do not."""
        if 0 < config.early_stopping.patience <= self.stale:
            return f"early stopping: no better {config.watch} since step {self.best_step}"
        for rule in config.convergence:
            recent = self.recent.get(rule.metric, [])[-rule.window :]
            most = rule.tolerance * max(map(abs, recent), default=0.0)
            if len(recent) == rule.window and max(recent) - min(recent) <= most:
                return (
                    f"converged: {rule.metric} within {rule.tolerance:g} of itself in "
                    f"{rule.window} evaluations"
                )
        return ""


def check_watched(config: TrainConfig, metrics: Collection[str]) -> None:
    """Refuse a config that goes by a metric which evaluations do not have.

    Raises:
        ConfigError: there is no such metric as `config.watch`, or one of `config.convergence`.
    """
    keys = {"watch": [config.watch], "convergence.metric": [r.metric for r in config.convergence]}
    for key, names in keys.items():
        for name in names:
            if name not in metrics:
                raise shared(
                    ConfigError(
                        f"{key}={name!r}: no such metric; the evaluation has "
                        f"{', '.join(sorted(metrics))}"
                    )
                )
