"""Tasks with tables: one that uses everything of them, and ones that go wrong."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.config import ScheduleConfig
from lockstep.optim import RowAdam, RowSignSGD

USERS, ITEMS, DIM = 300, 40, 8


class LookConfig(ls.TrainConfig):
    batch_size: int = 30
    num_microbatches: int = 5
    evil: str = ""
    """What goes wrong."""


class Towers(nn.Module):
    def __init__(self, evil):
        super().__init__()
        self.users = ls.nn.SparseEmbedding(USERS, DIM, RowAdam(lr=0.05), std=0.3)
        schedule = ScheduleConfig(name="cosine", warmup_steps=3)
        rows = RowSignSGD(lr=0.02, weight_decay=0.1)
        self.items = ls.nn.SparseEmbedding(ITEMS, DIM, rows, schedule=schedule)
        self.top = nn.Linear(DIM, DIM)

    def forward(self, users, items):
        hidden = F.dropout(self.top(self.users(users)), 0.1, self.training)
        return (hidden * (1 + self.items(items))).sum(-1)


class Look(ls.Task):
    """Two tables; each microbatch also looks up a user that it carries from the step before."""

    Config = LookConfig
    config: LookConfig
    splits = ("val", "test")

    def build_model(self):
        return Towers(self.config.evil)

    def dataset(self, split):
        # An epoch that does not fill its last batch: some microbatches have no samples there.
        count = {"train": 122, "val": 33, "test": 33}[split]
        generator = torch.Generator().manual_seed(count)
        users = torch.randint(USERS, (count,), generator=generator).int()
        items = torch.randint(ITEMS, (count,), generator=generator)
        return TensorDataset(users, items, torch.sin(users * 0.3) + items / ITEMS)

    def carry(self, model, batch):
        return {"last": batch[0][:1]}

    def lookups(self, batch, carry):
        users, items, _ = batch
        if self.config.evil == "forgets":
            return {"users": users, "items": items}
        if self.config.evil == "name":
            return {"users": users}
        if self.config.evil == "range":
            return {"users": users + USERS, "items": items}
        if self.config.evil == "kind":
            return {"users": users, "items": items.float()}
        if self.config.evil == "changes":
            carry["last"] += 1
        if self.config.evil == "draws":
            return {"users": torch.cat([users, carry["last"]]), "items": self.drawn(items)}
        return {"users": torch.cat([users, carry["last"]]), "items": items}

    def drawn(self, items):
        self.generator = getattr(self, "generator", torch.Generator())
        return torch.cat([items, torch.randint(ITEMS, (5,), generator=self.generator)])

    def loss(self, model, batch, carry):
        users, items, values = batch
        predicted = model(users, items) + 0.1 * model(carry["last"], items[:1])
        loss = F.mse_loss(predicted, values, reduction="sum")
        if self.config.evil == "infinite":
            loss = (
                loss
                + model.users(users).sum() * 0
                + (model.users(users) - model.users(users)).abs().sqrt().sum()
            )
        return ls.Loss(loss, len(users)), {"last": users[-1:]}

    def evaluate(self, model, batch):
        users, items, values = batch
        self.fail_at_last(users)
        return ls.Loss(F.mse_loss(model(users, items), values, reduction="sum"), len(users))

    def fail_at_last(self, users):
        """Only the rank with the last batch of an evaluation has one sample."""
        if self.config.evil == "evaluates" and len(users) == 1:
            raise RuntimeError("a batch that cannot be evaluated")


class Plain(Look):
    """Carries nothing."""

    carry = ls.Task.carry

    def lookups(self, batch):
        return {"users": batch[0], "items": batch[1]}

    def loss(self, model, batch):
        users, items, values = batch
        return ls.Loss(F.mse_loss(model(users, items), values, reduction="sum"), len(users))


class Some(Plain):
    """Looks up nothing for some microbatches."""

    def lookups(self, batch):
        chosen = batch[0] % 31 == 0
        return {"users": batch[0][chosen], "items": batch[1][chosen]}

    def loss(self, model, batch):
        users, items, values = (part[batch[0] % 31 == 0] for part in batch)
        loss = F.mse_loss(model(users, items), values, reduction="sum")
        return ls.Loss(loss + model.top.weight.square().sum(), len(batch[0]))

    def evaluate(self, model, batch):
        return self.loss(model, batch)


class InPhases(Plain):
    """Its second loss leaves one table and one parameter alone."""

    def phases(self):
        return [ls.Phase("whole", self.loss, 2), ls.Phase("users", self.of_users)]

    def of_users(self, model, batch):
        return ls.Loss(model.top(model.users(batch[0])).square().sum(), len(batch[0]))

    def build_optimizer(self, model):
        return {
            "whole": torch.optim.SGD([model.top.weight], lr=0.01),
            "users": torch.optim.Adam([model.top.bias], lr=0.01),
        }


class FirstBlock(nn.Module):
    """Looks items up."""

    def __init__(self):
        super().__init__()
        self.items = ls.nn.SparseEmbedding(ITEMS, DIM, RowAdam(lr=0.05), std=0.3)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, items):
        return self.linear(self.items(items)).tanh()


class InBlocks(Plain):
    """Has a table in a block of a pipeline."""

    def build_model(self):
        return ls.nn.Pipeline(FirstBlock(), nn.Linear(DIM, DIM), nn.Linear(DIM, 1))

    def lookups(self, batch):
        return {"0.items": batch[1]}

    def loss(self, model, batch):
        _, items, values = batch
        return ls.Loss((model(items)[:, 0] - values).square().sum(), len(items))

    def evaluate(self, model, batch):
        self.fail_at_last(batch[0])
        return self.loss(model, batch)


class Silent(Look):
    """Does not say what it looks up."""

    lookups = ls.Task.lookups


class Bare(Look):
    """Has nothing but tables."""

    def build_model(self):
        return nn.ModuleDict({"users": ls.nn.SparseEmbedding(USERS, DIM)})


class After(Look):
    """Looks rows up where they are not."""

    def after_step(self, model, step):
        model(torch.tensor([1]), torch.tensor([1]))
