"""What programs of `benchmarks/batch_loss.py` train: pairs of views, told from all others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, NUM_BATCHES, PIXELS = 512, 8, 784
"""Pairs of a global batch; batches of the data, which are passed over again and again."""
LR = 1e-3


def encoder() -> nn.Module:
    """Views [B, 784] to what they are compared by [B, 128]; the same start values each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(PIXELS, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 128)
    )


def views() -> tuple[Tensor, Tensor]:
    """Two noisy views of each sample, [BATCH * NUM_BATCHES, 784]."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(BATCH * NUM_BATCHES, PIXELS, generator=generator)

    sample = drawn()
    return sample + drawn(), sample + drawn()


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """The mean loss of pairs, each told from all others: InfoNCE with a temperature of 0.1."""
    scores = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(one)))
