"""A task whose loss is over the whole batch, for `test_batch_loss_on_ranks.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.launching.rank.environment import detect


class Redundancy(ls.Task):
    """Two views of a sample that should agree, and whose features should not be alike.

    With batch norm, dropout and noise; the last batch of an epoch is smaller.
    """

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 8)
        )

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split == "test":
            return None
        x = torch.randn(100, 6, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(x, x[:, :3].argmax(1))

    def outputs(self, model: Any, batch: Any) -> Any:
        x, _ = batch
        return model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        first, second = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in outputs)
        cross = first.T @ second / len(first) + 0.01 * torch.randn(8, 8).to(first.device)
        one = torch.eye(8, device=first.device)
        loss = (cross - one).square().sum() + 0.1 * batch[1].double().mean()
        agree = F.cosine_similarity(first, second).sum()
        return ls.Loss.mean(loss.float(), len(first), {"agree": (agree.detach(), len(first))})


class Searched(Redundancy):
    """Its optimizer evaluates the whole batch several times in a step."""

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)


class Apart(Redundancy):
    """Its loss becomes another one on each rank, after some steps."""

    done = 0

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        loss = super().batch_loss(outputs, batch)
        factor = 1 + (self.done > 4) * detect(os.environ).rank
        return ls.Loss(loss.sum * factor, loss.weight, loss.metrics)

    def after_step(self, model: Any, step: int) -> None:
        self.done = step

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
