"""Tasks that real ranks train in the tests: one that uses everything, and ones that go wrong."""

import os
import random
import signal
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.launching.rank.environment import detect


class EverythingConfig(ls.TrainConfig):
    batch_size: int = 48
    num_microbatches: int = 6
    steps: int = 14
    lr: float = 0.01
    dtype: Literal["float32", "float64"] = "float32"
    augment: bool = False
    groups: bool = False
    gate: bool = False
    wide: int = 0
    teacher: bool = False
    hooked: int = 0
    """After how many evaluations the run ends; 0 has no hooks."""
    evil: str = ""
    """What goes wrong, and at which of the samples or ranks."""


class Augmented(Dataset):
    """Draws from all three global random states."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        noise = torch.rand(1).item() + np.random.rand() + random.random()
        return self.images[index] + 0.1 * noise, self.labels[index]


class Gate(nn.Module):
    """A parameter that only microbatches with a positive mean use, the other way round for -."""

    def __init__(self, width):
        super().__init__()
        self.plus, self.minus = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.plus(x) if x.mean() > 0 else self.minus(x)


class Taught(nn.Module):
    """Is drawn towards a teacher, which moves once a step."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, x):
        return self.student(x) + 0.1 * self.teacher(x.flatten(1))


class Shrink(ls.Hook):
    """Changes the model at random after each step."""

    changes_model = True

    def after_step(self, run):
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                if name.endswith("bias"):
                    parameter.add_(0.001 * torch.randn(parameter.shape).to(parameter.device))


class Count(ls.Hook):
    """Ends the run after a number of evaluations."""

    def __init__(self, limit):
        self.limit, self.num_evaluations = limit, 0

    def after_evaluation(self, run, split, metrics):
        self.num_evaluations += 1
        if self.num_evaluations == self.limit:
            run.stop(f"{self.limit} evaluations")

    def state_dict(self):
        return {"num_evaluations": self.num_evaluations}

    def load_state_dict(self, state):
        self.num_evaluations = state["num_evaluations"]


class Diary(ls.Hook):
    """Writes on the first rank what happens, and draws random numbers nobody else draws."""

    first_only = True

    def after_step(self, run):
        self.write(run, "step", run.step, round(run.train["loss"], 6), torch.rand(()).item() > 1)

    def after_evaluation(self, run, split, metrics):
        self.write(run, split, run.step, round(metrics["loss"], 6))

    def after_checkpoint(self, run, folder):
        self.write(run, "checkpoint", int(folder.name.removeprefix("step_")))

    def on_end(self, run, status, reason):
        self.write(run, status, run.step, reason)

    def write(self, run, *values):
        with (run.run_dir / "diary.txt").open("a") as file:
            file.write(" ".join(map(str, values)) + "\n")


class Everything(ls.Task):
    """Convolution, batch norm, dropout, an uneven last batch, and what the config adds."""

    Config = EverythingConfig

    def __init__(self, config=None):
        super().__init__(config)
        self.count, self.average = 0, torch.zeros(())
        self.ema = ls.hooks.EMA(0.8)

    def hooks(self):
        limit = self.config.hooked
        return [Shrink(), self.ema, Count(limit), Diary()] if limit else []

    def after_step(self, model, step):
        self.count += 1
        if self.config.evil == "corrupt" and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            model[0].weight.data[0, 0, 0, 0] += 1e-3
        if self.config.teacher:
            self.average = 0.9 * self.average + model.student[-1].bias.detach().mean()
            with torch.no_grad():
                model.student[-1].weight *= 0.999
                noise = torch.randn(model.teacher.weight.shape)
                model.teacher.weight += 0.01 * noise.to(model.teacher.weight.device)
                model.teacher.bias.lerp_(model.student[-1].bias, 0.1)

    def state_dict(self):
        return {"count": self.count, "average": self.average}

    def load_state_dict(self, state):
        self.count, self.average = state["count"], state["average"]

    def build_model(self):
        config = self.config
        if config.evil == "start" and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            torch.manual_seed(99)
        if config.evil == "death" and detect(os.environ).rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        width = 4 * 36
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
        if config.gate:
            layers.append(Gate(width))
        if config.wide:
            layers += [nn.Linear(width, config.wide), nn.Tanh(), nn.Linear(config.wide, width)]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        if config.teacher:
            model = Taught(model, nn.Linear(64, 10).requires_grad_(False))
        return model.to(getattr(torch, config.dtype))

    def dataset(self, split):
        size = {"train": 203, "val": 37, "test": 0}[split]
        if not size:
            return None
        generator = torch.Generator().manual_seed(size)
        dtype = getattr(torch, self.config.dtype)
        images = torch.randn(size, 1, 8, 8, generator=generator, dtype=dtype)
        labels = torch.randint(0, 10, (size,), generator=generator)
        if self.config.evil == "nan" and split == "train":
            images[150] = torch.nan
        if self.config.augment and split == "train":
            return Augmented(images, labels)
        return TensorDataset(images, labels)

    def loss(self, model, batch):
        images, labels = batch
        evil = self.config.evil
        if evil == "counter":
            self.count += 1
        if self.config.teacher:
            noise = torch.randn(images.shape, generator=ls.generator(), dtype=images.dtype)
            noise = noise.to(images.device)
            images = images + 0.01 * (1 + self.count) * noise * (1 + self.average)
        logits = model(images)
        if self.config.hooked:
            logits = logits + 0.1 * self.ema(model, images)
        if evil == "shape":
            loss = nn.functional.cross_entropy(logits, labels, reduction="none")
            return ls.Loss(loss, len(labels))
        if evil == "raise" and os.environ.get("OMPI_COMM_WORLD_RANK") == "1" and model.training:
            raise RuntimeError("the dog ate it")
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        if evil == "rank":
            rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
            loss = loss * (1 + rank * (self.count > 0))  # the first step compares ranks
        correct = (logits.argmax(1) == labels).sum()
        if evil == "world" and not model.training:
            correct = correct * detect(os.environ).world_size
        return ls.Loss(loss, len(labels), {"accuracy": (correct, len(labels))})

    def build_optimizer(self, model):
        if not self.config.groups:
            return None
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.002}], lr=0.01
        )


class NoTrainingData(Everything):
    def dataset(self, split):
        return TensorDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))


if __name__ == "__main__":
    ls.main(Everything(), run_dir=os.environ.get("RUN_DIR"))
