"""Trains models on the ranks it is started on, and writes down the most device memory of each run.

    python memory_cases.py FOLDER "MODEL OPTIMIZER" ...

Rank R writes `peaks-WORLD_SIZE-R.json` into the folder: bytes by case, number of microbatches and
layout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.config import override
from lockstep.config.train_config import Sharding
from lockstep.launching import api as front
from lockstep.launching.api import Session
from lockstep.launching.rank.environment import detect
from lockstep.sketch import SKLinear
from lockstep.systems.digits.task import Digits

sys.path[:0] = [str(Path(__file__).parent.parent / "nn")]

import models  # noqa: E402

WIDTH = 256


class Perceptron(ls.Task):
    """Three layers in a row."""

    def build_model(self) -> nn.Module:
        """See `ls.Task`."""
        layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 4 * WIDTH))
        return ls.nn.Pipeline(*layers, nn.Tanh(), nn.Linear(4 * WIDTH, 4))

    def dataset(self, split: str) -> Any:
        """See `ls.Task`."""
        x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.argmax(1) % 4) if split == "train" else None

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        """See `ls.Task`."""
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return ls.Loss.mean(loss, len(batch[0]))


class Transformer(models.Language):
    """Six blocks, of which the first and the last share a weight."""

    def layer(self, number: int) -> nn.Module:
        """A block of it."""
        return models.Layer(WIDTH, 4, 0.1)

    def dataset(self, split: str) -> Any:
        """See `ls.Task`."""
        tokens = torch.randint(models.TOKENS, (64, 17), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens) if split == "train" else None

    def build_model(self) -> nn.Module:
        """See `ls.Task`."""
        start = models.Start(WIDTH)
        layers = map(self.layer, range(4))
        return ls.nn.Pipeline(start, *layers, models.End(start.embedding))


class Sketched(Transformer):
    """As `Transformer`, with sketched feed-forward layers."""

    def layer(self, number: int) -> nn.Module:
        """See `Transformer`."""
        layer = models.Layer(WIDTH, 4, 0.1)
        layer.up = SKLinear(WIDTH, 4 * WIDTH, low_rank=16, seed=1, layer=2 * number)
        layer.down = SKLinear(4 * WIDTH, WIDTH, low_rank=16, seed=1, layer=2 * number + 1)
        return layer


MODELS: dict[str, tuple[type[ls.Task], int, Sequence[str]]] = {
    "perceptron": (Perceptron, 64, ()),
    "transformer": (Transformer, 8, ()),
    "cnn": (Digits, 32, ("model=cnn", "schedule.name=constant")),
    "sketched": (Sketched, 8, ()),
}
"""Task, samples of a microbatch, and keys."""
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}
NUMBERS = (1, 4)
"""Microbatches."""
KINDS: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
LAYOUTS = {
    1: ("sharding=none",),
    2: ("sharding=none", *(f"sharding={k}" for k in KINDS), "mesh.pp=2"),
}


def task_of(case: str) -> type[ls.Task]:
    """The task of a case."""
    model, optimizer = case.split()

    def build_optimizer(self: Any, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[optimizer](model.parameters())

    attributes = {"build_optimizer": build_optimizer, "__module__": __name__}
    return type("Measured", (MODELS[model][0],), attributes)


def config_of(case: str, number: int, *keys: str) -> ls.TrainConfig:
    """The config of a run with a number of microbatches."""
    _, size, own = MODELS[case.split()[0]]
    of_batch = (f"batch_size={size * number}", f"num_microbatches={number}")
    rest = ("steps=4", "checkpoint.every=2", "eval_every=99", "log_every=1")
    return override(task_of(case).Config(), [*own, *of_batch, *rest, *keys], case)


def peak(case: str, number: int, layout: str, folder: Path) -> int:
    """The most memory that a training has of this rank's device, beyond what was in use before."""
    place = detect(os.environ)
    config = config_of(case, number, layout, "device=accelerator")
    run_dir = folder / f"{place.world_size} {case} {number} {layout}"
    gc.collect()
    before = torch.accelerator.memory_allocated(place.local_rank)
    torch.accelerator.reset_peak_memory_stats(place.local_rank)
    front.run(task_of(case)(config), config, Session(str(run_dir), console=False))
    return torch.accelerator.max_memory_allocated(place.local_rank) - before


def main() -> None:
    folder, place = Path(sys.argv[1]), detect(os.environ)
    found = {
        case: {
            str(number): {
                each: peak(case, number, each, folder) for each in LAYOUTS[place.world_size]
            }
            for number in NUMBERS
        }
        for case in sys.argv[2:]
    }
    path = folder / f"peaks-{place.world_size}-{place.rank}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
