"""Tasks whose microbatches carry state: one that uses everything of it, and ones that go wrong."""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

TRACKS, WINDOWS = 14, 7


class ReaderConfig(ls.TrainConfig):
    batch_size: int = TRACKS
    num_microbatches: int = 5
    evil: str = ""
    """What goes wrong."""


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 12)
        self.cell = nn.GRU(12, 12, batch_first=True)
        self.up, self.head = nn.Linear(12, 16), nn.Linear(16, 8)

    def forward(self, tokens, memory):
        states, memory = self.cell(self.embed(tokens), memory)
        return self.head(torch.tanh(self.up(F.dropout(states, 0.1, self.training)))), memory


class Read(ls.Task):
    """Goes on with its memory; a carry that grows, with numbers, and that draws."""

    Config = ReaderConfig
    config: ReaderConfig

    def build_model(self):
        model = Reader()
        return ls.nn.shard(model, {"up": "column", "head": "row"})

    def dataset(self, split):
        # An epoch that does not fill its last batch: some microbatches have no samples there.
        generator = torch.Generator().manual_seed(3)
        rows = torch.randint(0, 8, (TRACKS * WINDOWS + 3, 6), generator=generator)
        return TensorDataset(rows) if split in ("train", "val") else None

    def carry(self, model, batch):
        memory = torch.randn(1, len(batch[0]), 12, device=batch[0].device)
        return {"memory": memory, "seen": [], "steps": 0}

    def loss(self, model, batch, carry):
        (tokens,) = batch
        memory = carry["memory"]
        memory.mul_(0.9)  # its own copy
        memory = F.pad(memory, (0, 0, 0, max(0, len(tokens) - memory.shape[1])))[:, : len(tokens)]
        logits, memory = model(tokens[:, :-1], memory)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        seen = [*carry["seen"], tokens[:, 0].float().mean()][-3:]
        after = {"memory": memory, "seen": seen, "steps": carry["steps"] + 1}
        weight = tokens[:, 1:].numel()
        return ls.Loss(loss, weight, {"steps": (carry["steps"], 1)}), self._spoilt(after)

    def _spoilt(self, after):
        return after | ({"steps": object()} if self.config.evil == "object" else {})


class Forgets(Read):
    """Returns no carry."""

    def loss(self, model, batch, carry):
        return super().loss(model, batch, carry)[0]


class TakesNone(ls.Task):
    """Has a carry that its loss does not take."""

    def build_model(self):
        return nn.Linear(1, 1)

    def dataset(self, split):
        return TensorDataset(torch.ones(8, 1)) if split == "train" else None

    def carry(self, model, batch):
        return torch.zeros(1)

    def loss(self, model, batch):
        return ls.Loss(model(batch[0]).sum(), len(batch[0]))


class HasNone(TakesNone):
    """Takes a carry that it does not have."""

    carry = ls.Task.carry

    def loss(self, model, batch, carry):
        return ls.Loss(model(batch[0]).sum(), len(batch[0])), carry


class Random(Read):
    """A carry that is another one each time."""

    def loss(self, model, batch, carry):
        loss, after = super().loss(model, batch, carry)
        return loss, after | {"time": time.perf_counter()}


class Short(TakesNone):
    """A carry that takes no batch."""

    def carry(self, model):
        return None

    def loss(self, model, batch, carry):
        return ls.Loss(model(batch[0]).sum(), len(batch[0])), carry


class Evaluates(Short):
    """An evaluation that takes a carry."""

    def carry(self, model, batch):
        return None

    def evaluate(self, model, batch, carry):
        return self.loss(model, batch, carry)[0]
