"""A model of 100.7 million parameters, and how much memory its start takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls

WIDTH, BLOCKS = 2048, 24


def memory(key: str) -> int:
    """A line of this process's status in bytes, such as `VmHWM`: its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


class Block(nn.Module):
    """x + relu(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(x).relu()
        return y


class Peak(ls.Hook):
    """Writes the peak above what the process had before it built the model."""

    scratch = ("hook.*",)

    def __init__(self, task: Large) -> None:
        self.task = task

    def on_start(self, run: Any) -> None:
        found = {
            "whole": BLOCKS * (WIDTH * WIDTH + WIDTH) * 4,
            "built": self.task.built - self.task.before,
            "peak": memory("VmHWM") - self.task.before,
        }
        path = Path(os.environ["PEAKS"]) / f"start.{os.getpid()}.json"
        path.write_text(json.dumps(found))


class Large(ls.Task):
    """Brings the outputs of a long row of blocks to 1."""

    scratch = ("task.*",)

    def build_model(self) -> nn.Module:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        self.before = memory("VmRSS")
        model = ls.nn.Pipeline(*(Block() for _ in range(BLOCKS)))
        self.built = memory("VmHWM")
        return model

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(16, WIDTH, generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        outputs = model(batch[0])
        return ls.Loss((outputs - 1).square().sum(), outputs.numel())

    def hooks(self) -> Any:
        return [Peak(self)]
