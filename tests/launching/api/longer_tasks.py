"""Tasks for tests of runs that go on for longer than they were begun for."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls


class LineConfig(ls.TrainConfig):
    """60 samples: an epoch has 6 steps."""

    batch_size: int = 10
    num_microbatches: int = 5
    lr: float = 0.03
    epochs: int = 2
    how: str = ""
    """How the task asks for the length of the run."""


class Count(ls.Hook):
    """Counts evaluations, and may end the run after some."""

    def __init__(self, last: int = 0) -> None:
        self.last, self.num_seen = last, 0

    def after_evaluation(self, run: ls.Run, split: str, metrics: dict[str, float]) -> None:
        self.num_seen += 1
        if self.num_seen == self.last:
            run.stop("counted enough")

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_seen = state["num_seen"]


class Look(ls.Hook):
    """Asks the run how long it is, in a step that no resumed run does again."""

    def after_step(self, run: ls.Run) -> None:
        if run.step == 3:
            run.total_steps  # noqa: B018


class Show(ls.Hook):
    """Shows how far the run is, on the first rank."""

    first_only = True

    def after_step(self, run: ls.Run) -> None:
        with (run.run_dir / "shown.txt").open("a") as file:
            file.write(f"{run.step} of {run.total_steps}\n")


class Line(ls.Task):
    """A small network with dropout, so that random states matter."""

    Config = LineConfig
    config: LineConfig

    def hooks(self) -> list[ls.Hook]:
        kinds = {"look": Look(), "show": Show(), "count": Count(), "counted": Count(2)}
        return [kinds[self.config.how]] if self.config.how in kinds else []

    def build_model(self) -> nn.Module:
        if self.config.how == "build":
            self.config.model_dump()
        if self.config.how == "compare":
            bool(self.config == LineConfig())
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def dataset(self, split: str) -> Dataset[Any] | None:
        size = {"train": 60, "val": 20, "test": 20}[split]
        x = torch.randn(size, 3, generator=torch.Generator().manual_seed(size))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        if self.config.how == "on one rank" and os.environ.get("LOCKSTEP_LOCAL_RANK") == "1":
            self.config.epochs  # noqa: B018
        x, y = batch
        return ls.Loss((model(x) - y).square().sum(), len(x))

    def after_step(self, model: nn.Module, step: int) -> None:
        if self.config.how == "late" and step == 4:
            getattr(self.config, "epochs")  # noqa: B009


class OwnRate(Line):
    """A learning rate of its own."""

    def lr_factor(self, step: int, total_steps: int) -> float:
        return 0.9**step if self.config.how == "of step" else 1 - step / (total_steps + 1)


class OwnInit(Line):
    """Has a method `__init__`."""

    def __init__(self, config: LineConfig | None = None) -> None:
        super().__init__(config)
        if self.config.how == "init":
            self.total = self.config.epochs


if __name__ == "__main__":
    ls.main(OwnInit())
