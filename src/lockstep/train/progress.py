"""What a run remembers beside its tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config import TrainConfig
from lockstep.errors import ConfigError


@dataclass
class Progress:
    """Position and history, as kept in a checkpoint.

    Attributes:
        step: committed optimizer steps.
        evaluated: the step of the newest evaluation.
        best: best value so far of the watched metric; None before the first evaluation.
        best_step: the step that had it.
        stale: evaluations since then.
        metrics: of the newest evaluation, by "split/name"; those of training before the first.
        finished: why the run is over; empty while it is not.
    """

    step: int = 0
    evaluated: int = 0
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    finished: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """The inverse of `to_json`."""
        return cls(**values)

    def judge(self, config: TrainConfig, metrics: dict[str, float]) -> bool:
        """Take note of an evaluation; whether it is the best so far.

        Raises:
            ConfigError: there is no such metric as `config.watch`.
        """
        if config.watch not in metrics:
            raise ConfigError(
                f"watch={config.watch!r}: no such metric; the evaluation has "
                f"{', '.join(sorted(metrics))}"
            )
        self.evaluated = self.step
        value = metrics[config.watch]
        sign = 1.0 if config.watch_mode == "max" else -1.0
        gain = -math.inf if math.isnan(value) else math.inf
        if self.best is not None and not math.isnan(value):
            gain = sign * (value - self.best)
        if gain > config.early_stopping.min_delta:
            self.best, self.best_step, self.stale = value, self.step, 0
            return True
        self.stale += 1
        return False

    def exhausted(self, config: TrainConfig) -> bool:
        """Whether early stopping says that enough is enough."""
        return 0 < config.early_stopping.patience <= self.stale
