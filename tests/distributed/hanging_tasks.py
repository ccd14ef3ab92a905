"""A task of which one rank hangs in its own code."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class HangingConfig(ls.TrainConfig):
    batch_size: int = 12
    num_microbatches: int = 6
    steps: int = 30
    log_every: int = 1
    hang_timeout_s: float = 1.5


class Hanging(ls.Task):
    name = "hanging"
    Config = HangingConfig

    def build_model(self):
        return nn.Linear(4, 2)

    def dataset(self, split):
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(48, 4, generator=generator), torch.arange(48, dtype=torch.int64) % 2
        )

    def loss(self, model, batch):
        x, y = batch
        # Not in the task, whose state no microbatch may change.
        calls = int(os.environ.get("CALLS_OF_LOSS", "0")) + 1
        os.environ["CALLS_OF_LOSS"] = str(calls)
        while own_rank() == 1 and calls > 30:
            time.sleep(0.1)
        return ls.Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))


def own_rank():
    """The first rank of this process."""
    names = ("OMPI_COMM_WORLD_RANK", "LOCKSTEP_LOCAL_RANK", "RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)
