"""A task whose microbatches take longer on one rank: what `SLOWED` says, as in `1x3`.

Each takes some matrix products that nothing depends on; on rank 1, three times as many. So that
rank is slower as on a slower core, and the parameters are the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.launching.rank.environment import detect

SLOWED = "LOCKSTEP_BENCHMARK_SLOWED"
"""Environment variable: number of the slow rank, and how many times as long it takes."""
_PRODUCTS = 24
"""Of each microbatch on the other ranks, of square matrices of this size:"""
_SIZE = 256


class Slowed(ls.Task):
    """Regression, with products of matrices beside it."""

    def build_model(self) -> nn.Module:
        """Inputs [N, 8] to [N, 1]."""
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def dataset(self, split: str) -> TensorDataset | None:
        """Inputs and their sums of squares."""
        if split != "train":
            return None
        inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        """Squared error."""
        inputs, targets = batch
        _work(_PRODUCTS * _times_as_long())
        return ls.Loss((model(inputs) - targets).square().sum(), len(inputs))


def _times_as_long() -> int:
    rank, _, factor = os.environ[SLOWED].partition("x")
    return int(factor) if detect(os.environ).rank == int(rank) else 1


@torch.no_grad()
def _work(products: int) -> Tensor:
    matrix = torch.full((_SIZE, _SIZE), 1 / _SIZE)
    for _ in range(products):
        matrix = matrix @ matrix
    return matrix
