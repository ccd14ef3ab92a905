"""Tasks whose gradients are large, missing or of no elements."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class OddConfig(ls.TrainConfig):
    batch_size: int = 32
    num_microbatches: int = 4
    steps: int = 4
    scale: float = 1.0


class Large(ls.Task):
    """A loss that is multiplied."""

    Config = OddConfig
    config: OddConfig

    def build_model(self):
        return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))

    def dataset(self, split):
        if split != "train":
            return None
        inputs = torch.randn(150, 12, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, (inputs[:, 0] > 0).long())

    def loss(self, model, batch):
        inputs, labels = batch
        value = F.cross_entropy(model(inputs), labels, reduction="sum")
        return ls.Loss(value * self.config.scale, len(labels))


class Freezes(Large):
    """Stops to train a layer."""

    def after_step(self, model, step):
        model[0].requires_grad_(False)


class Few(Large):
    """Has fewer samples than workers have steps."""

    def dataset(self, split):
        full = super().dataset(split)
        return full and TensorDataset(*full[:5])


class Nothing(Large):
    """Has a parameter without elements alone."""

    def build_model(self):
        model = nn.Module()
        model.empty = nn.Parameter(torch.zeros(0, 12))
        return model

    def loss(self, model, batch):
        return ls.Loss(model.empty.sum(), len(batch[1]))
