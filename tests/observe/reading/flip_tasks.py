"""A task that goes wrong by one bit where it is told to."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class Flip(ls.Task):
    """With `FLIP_AT`, a bit of a weight is another one after that step."""

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        if split != "train":
            return None
        return TensorDataset(torch.linspace(-1, 1, 256).view(64, 4))

    def loss(self, model, batch):
        return ls.Loss((model(batch[0])[:, 0] - batch[0].sum(1)).square().sum(), len(batch[0]))

    def after_step(self, model, step):
        if step == int(os.environ.get("FLIP_AT", "-1")):
            weight = model[2].weight.data.view(torch.int32)
            weight[0, 5] ^= 1 << int(os.environ["FLIP_BIT"])
