"""A task that is ill in a way that it is told; for the scoreboard of `lockstep diagnose`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep as ls


class IllConfig(ls.TrainConfig):
    """What is wrong, and how large the work is."""

    batch_size: int = 512
    num_microbatches: int = 8
    lr: float = 1e-4
    steps: int = 150
    ill: str = ""
    """What is wrong; nothing if empty."""
    width: int = 384
    depth: int = 3
    samples: int = 4096


def rank() -> int:
    """Number of this process among those that were started."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("LOCKSTEP_LOCAL_RANK", "0")))


class Samples(Dataset[Tensor]):
    """Random samples, which may be slow to come."""

    def __init__(self, config: IllConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(config.samples, 64, generator=generator)
        self.ill = config.ill

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        if self.ill == "data" or (self.ill == "data of a rank" and rank() == 1):
            time.sleep(2e-4)
        return self.values[index]


class Ill(ls.Task):
    """Learns the sum of its inputs."""

    Config = IllConfig
    config: IllConfig

    def build_model(self) -> nn.Module:
        """Linear layers."""
        width = self.config.width
        inner: list[nn.Module] = []
        for _ in range(self.config.depth - 1):
            inner += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *inner, nn.Linear(width, 1))

    def dataset(self, split: str) -> Samples | None:
        """The same samples for both splits."""
        return Samples(self.config) if split in ("train", "val") else None

    def loss(self, model: nn.Module, batch: Tensor) -> ls.Loss:
        """The squared error."""
        if self.config.ill == "slow rank" and rank() == 1:
            time.sleep(0.01)
        loss = (model(batch)[:, 0] - batch.sum(1)).square().sum()
        return ls.Loss(loss, len(batch))

    def evaluate(self, model: nn.Module, batch: Tensor) -> ls.Loss:
        """The same."""
        if self.config.ill == "evaluation":
            time.sleep(0.02)
        return self.loss(model, batch)

    def after_step(self, model: Any, step: int) -> None:
        """Go wrong in the middle of the run."""
        if step != 60:
            return
        if self.config.ill == "not finite":
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
        if self.config.ill == "flipped bit" and rank() == 1:
            model[2].weight.data.view(torch.int32)[3, 5] ^= 1 << 12
        if self.config.ill == "error":
            raise ValueError("no such thing")
        if self.config.ill == "killed":
            os.kill(os.getpid(), 9)
