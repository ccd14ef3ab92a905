"""Tasks whose state differs between ranks, or begins late."""

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

RANK = int(os.environ.get("LOCKSTEP_LOCAL_RANK", "0"))


class StateConfig(ls.TrainConfig):
    batch_size: int = 24
    num_microbatches: int = 6
    steps: int = 14
    lr: float = 0.05
    eval_every: int = 5
    eval_batch_size: int = 8
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=13)
    tag: str = ""


class Plain(ls.Task):
    """Keeps the number of steps."""

    Config = StateConfig
    config: StateConfig
    tag = 0

    def __init__(self, config=None):
        super().__init__(config)
        self.step = 0

    def build_model(self):
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
        return ls.nn.Pipeline(*blocks, nn.Linear(6, 2))

    def dataset(self, split):
        if split == "test":
            return None
        x = torch.randn(72, 6, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def loss(self, model, batch):
        x, y = batch
        return ls.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class Late(Plain):
    """Divides by a mean of the losses that it has computed, once they are small."""

    mean = 1.0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if torch.is_grad_enabled() and float(loss.sum.detach()) < 0.45 * loss.weight:
            self.mean = 0.9 * self.mean + 0.1 * float(loss.sum.detach())
        return ls.Loss(loss.sum / self.mean, loss.weight)


class Parts(Plain):
    """Keeps something else on each rank, from a step on that nobody looks at."""

    def after_step(self, model, step):
        if step == 11:
            self.tag = RANK


class Apart(Plain):
    """Has something else on each rank from the start, of which no result depends."""

    def __init__(self, config=None):
        super().__init__(config)
        self.tag = RANK


class OwnRate(Plain):
    """Has one rank step with another weight decay from some step on."""

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def hooks(self):
        return [Decays()]


class Decays(ls.Hook):
    changes_model = True

    def after_step(self, run):
        if run.step == 11 and RANK == 1:
            for group in run.optimizer.param_groups:
                group["weight_decay"] = 0.0


class OwnOrder(Plain):
    """Goes through its samples in another order on each rank, from the third epoch on."""

    def epoch_indices(self, epoch, generator):
        order = generator.permutation(len(self.dataset("train")))
        return order[::-1] if epoch > 1 and RANK == 1 else order


class StopsAlone(Plain):
    """Has enough on one rank only: after a step, or after an evaluation."""

    def hooks(self):
        return [Enough()]


class Enough(ls.Hook):
    def after_step(self, run):
        if run.config.tag == "step" and run.step == 7 and RANK == 1:
            run.stop("enough")

    def after_evaluation(self, run, split, metrics):
        if run.config.tag == "evaluation" and RANK == 1:
            run.stop("enough")


class Caches(Plain):
    """Keeps what it has made of each sample: other ones on each rank."""

    def __init__(self, config=None):
        super().__init__(config)
        self.made = {}

    def loss(self, model, batch):
        x, y = batch
        rows = [self.made.setdefault(round(float(row[0]), 4), row.clone()) for row in x]
        return super().loss(model, (torch.stack(rows), y))


class DiesAtStart(Plain):
    """Has one rank killed once while it builds its model, as for want of memory."""

    def build_model(self):
        flag = Path(os.environ["DIE_FLAG"])
        rank = os.environ.get("LOCKSTEP_LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
        if rank == os.environ.get("DIE_RANK", "1") and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build_model()


class LooksOn(ls.Hook):
    """Has a function called by the model, on the first rank alone."""

    first_only = True

    def on_start(self, run):
        run.model.register_forward_hook(lambda *_: None)


class Watched(Plain):
    """Is looked on at."""

    def hooks(self):
        return [LooksOn()]


class Remembers(Plain):
    """Keeps the last batch that it has seen, which looks like a cache."""

    def __init__(self, config=None):
        super().__init__(config)
        self.last = {"x": None}

    def loss(self, model, batch):
        self.last["x"] = batch[0].clone()
        return super().loss(model, batch)
