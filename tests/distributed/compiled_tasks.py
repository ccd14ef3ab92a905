"""A task whose model torch compiles."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(12, 32), nn.LayerNorm(32)
        self.drop, self.outer = nn.Dropout(0.1), nn.Linear(32, 3)

    def forward(self, x):
        return self.outer(self.drop(F.gelu(self.norm(self.inner(x)))))


class Compiled(ls.Task):
    """Each batch is as long as its labels say: more shapes than torch compiles by itself."""

    def build_model(self):
        model = Layers()
        model.compile(dynamic=False)
        return model

    def dataset(self, split):
        if split == "test":
            return None
        count = {"train": 122, "val": 33}[split]
        generator = torch.Generator().manual_seed(count)
        features = torch.randn(count, 12, generator=generator)
        return TensorDataset(features, features[:, :3].argmax(1))

    def loss(self, model, batch):
        features, labels = batch
        length = 20 + 3 * int(labels.sum())
        logits = model(features.repeat(length, 1)[:length]).exp().sum(0)
        loss = F.cross_entropy(model(features), labels, reduction="sum")
        return ls.Loss(loss + logits.log().sum(), len(features))
