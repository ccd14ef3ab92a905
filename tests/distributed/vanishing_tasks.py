"""Training whose run directory is deleted, moved or replaced by its own hook."""

import shutil
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


class VanishingConfig(ls.TrainConfig):
    batch_size: int = 12
    num_microbatches: int = 4
    steps: int = 60
    lr: float = 0.05
    log_every: int = 1
    how: str = ""


class Vanishes(ls.Hook):
    first_only = True

    def __init__(self, how):
        self.how = how

    def after_step(self, run):
        time.sleep(0.02)
        if run.step != 20:
            return
        if self.how == "deleted":
            shutil.rmtree(run.run_dir)
        elif self.how:
            run.run_dir.rename(run.run_dir.with_name("elsewhere"))
        if self.how == "replaced":
            run.run_dir.mkdir()
            (run.run_dir / "mine.txt").write_text("kept")


class Fit(ls.Task):
    Config = VanishingConfig
    config: VanishingConfig

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 2))

    def dataset(self, split):
        if split != "train":
            return None
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def loss(self, model, batch):
        x, y = batch
        return ls.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    def hooks(self):
        return [Vanishes(self.config.how)]
