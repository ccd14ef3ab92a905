"""Hooks that many runs need: a moving average of the parameters, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.engine.hook import Hook, Run
from lockstep.errors import ConfigError


class EMA(Hook):
    """An exponential moving average of the parameters (Polyak and Juditsky 1992).

    average ← decay * average + (1 - decay) * parameter, after each step; the first average is the
    parameter after the first step. Keep it in the task, and evaluate with it:

        def __init__(self, config=None):
            super().__init__(config)
            self.ema = ls.hooks.EMA(0.999)

        def hooks(self):
            return [self.ema]

        def evaluate(self, model, batch):
            x, y = batch
            return self.loss_of(self.ema(model, x), y)

    Attributes:
        average: averages of the trained parameters by name; empty before the first step.
    """

    def __init__(self, decay: float = 0.999) -> None:
        """Make an average.

        Args:
            decay: part of the average that a step leaves, in [0, 1).

        Raises:
            ConfigError: it is not in [0, 1).
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"EMA: decay={decay}: must be at least 0 and less than 1")
        self._decay = decay
        self.average: dict[str, Tensor] = {}

    def on_start(self, run: Run) -> None:
        """Move averages that were loaded to the devices of the parameters."""
        self._follow(run.model)

    def after_step(self, run: Run) -> None:
        """Update the averages."""
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                if not parameter.requires_grad:
                    continue
                if name in self.average:
                    self.average[name].lerp_(parameter, 1 - self._decay)
                else:
                    self.average[name] = parameter.detach().clone()

    def __call__(self, model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        """The model's output with the averages for its parameters, and its own buffers."""
        self._follow(model)  # `on_start` is not called where a run is only evaluated
        return torch.func.functional_call(model, dict(self.average), arguments, keywords)

    def state_dict(self) -> dict[str, Any]:
        """The averages by name."""
        return dict(self.average)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy averages, on the devices they are on."""
        self.average = {name: tensor.clone() for name, tensor in state.items()}

    def _follow(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            average = self.average.get(name)
            if average is not None and average.device != parameter.device:
                self.average[name] = average.to(parameter.device)


class EarlyStopping(Hook):
    """Ends the run when a metric of an evaluation has not improved for some evaluations.

    The config has the same for the metric `watch` (`early_stopping.patience`). This hook is for
    further metrics, and a start for rules of your own.
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        split: str = "val",
    ) -> None:
        """Make a rule.

        Args:
            metric: name of the metric.
            patience: number of evaluations without improvement that end the run, at least 1.
            mode: whether less or more is better.
            min_delta: least change that counts as an improvement.
            split: name of the split.

        Raises:
            ConfigError: `patience` is less than 1, or `mode` is something else.
        """
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience={patience}: must be at least 1")
        if mode not in ("min", "max"):
            raise ConfigError(f"EarlyStopping: mode={mode!r}: must be min or max")
        self._metric, self._patience, self._split = metric, patience, split
        self._sign, self._min_delta = (1.0 if mode == "max" else -1.0), min_delta
        self.best = -math.inf
        self.num_stale = 0

    def after_evaluation(self, run: Run, split: str, metrics: dict[str, float]) -> None:
        """Compare the metric with the best one.

        Raises:
            ConfigError: the evaluation has no such metric.
        """
        if split != self._split:
            return
        if self._metric not in metrics:
            raise ConfigError(
                f"EarlyStopping: metric={self._metric!r}: no such metric; the evaluation has "
                f"{', '.join(sorted(metrics))}"
            )
        value = self._sign * metrics[self._metric]
        if value > self.best + self._min_delta:
            self.best, self.num_stale = value, 0
            return
        self.num_stale += 1
        if self.num_stale >= self._patience:
            run.stop(f"no better {self._metric} of {split} in {self.num_stale} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """The best value, and how many evaluations have not improved it."""
        return {"best": self.best, "num_stale": self.num_stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value and the count."""
        self.best, self.num_stale = state["best"], state["num_stale"]
