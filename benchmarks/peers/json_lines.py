"""What programs of `benchmarks/streams.py` read: JSON lines of features and a label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn

NUM_FILES, LINES, FEATURES, CLASSES = 16, 2000, 128, 10
"""Files, samples of each, and numbers of a sample."""
BATCH, MICROBATCHES = 256, 8
"""Samples of a global batch, and its parts; all lines are read once."""
WARMUP = 32
"""Steps before time is taken."""
LR = 1e-3


def written(folder: Path) -> list[str]:
    """The files, with the same lines each time."""
    generator, paths = torch.Generator().manual_seed(0), []
    for number in range(NUM_FILES):
        values = torch.randn(LINES, FEATURES, generator=generator)
        path = folder / f"{number:02}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in ([round(value, 4) for value in line] for line in values.tolist()):
                file.write(json.dumps({"x": row, "y": int(abs(row[0]) * 10) % CLASSES}) + "\n")
        paths.append(str(path))
    return paths


_READ = {"bytes": 0}


def _lines(paths: list[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with Path(path).open(encoding="utf-8") as file:
            for line in file:
                _READ["bytes"] += len(line)
                yield json.loads(line)


def stream(folder: str) -> datasets.IterableDataset:
    """The lines of all files, each of which is a shard."""
    paths = sorted(map(str, Path(folder).glob("*.jsonl")))
    return datasets.IterableDataset.from_generator(_lines, gen_kwargs={"paths": paths})


def classifier() -> nn.Module:
    """The same start values each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def tensors(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """A batch."""
    return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])


def step_s(ends: list[float]) -> float:
    """Mean seconds of a step after the warmup, of the times at which steps have ended."""
    return (ends[-1] - ends[WARMUP - 1]) / (len(ends) - WARMUP)


def bytes_read() -> int:
    """Bytes of lines that this process has read."""
    return _READ["bytes"]
