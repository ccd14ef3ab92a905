"""Steps of a model with a table of rows on two ranks; started by `tables.py`.

Prints one JSON line on rank 0: seconds of each step, and megabytes that a rank sends in one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import CheckpointConfig
from lockstep.engine.tables import exchange
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect
from lockstep.observe import read_events
from lockstep.optim import RowSGD

DIM, BATCH, CLASSES, WARMUP = 512, 384, 10, 5


def batches(num_rows: int, steps: int) -> tuple[Tensor, Tensor]:
    """Numbers of rows, drawn uniformly, and classes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(num_rows, (steps * BATCH,), generator=generator)
    return ids, torch.randint(CLASSES, (steps * BATCH,), generator=generator)


class Model(nn.Module):
    """A row, and a linear layer."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.table = lockstep.nn.SparseEmbedding(num_rows, DIM, RowSGD(lr=0.1), std=0.01)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, classes]."""
        logits: Tensor = self.head(self.table(ids))
        return logits


class Lookups(lockstep.Task):
    """Rows looked up at random."""

    def __init__(self, num_rows: int, config: lockstep.TrainConfig) -> None:
        super().__init__(config)
        self._num_rows = num_rows

    def build_model(self) -> nn.Module:
        """With rows that are there from the beginning."""
        return Model(self._num_rows)

    def dataset(self, split: str) -> TensorDataset | None:
        """Random rows; nothing to evaluate on."""
        steps = self.config.steps or 1
        return TensorDataset(*batches(self._num_rows, steps)) if split == "train" else None

    def lookups(self, batch: Any) -> dict[str, Tensor]:
        """The rows of a batch."""
        return {"table": batch[0]}

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        """Cross-entropy."""
        return lockstep.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-buddy", action="store_true")
    args = parser.parse_args()
    sent = counted()
    steps = WARMUP + args.steps
    config = lockstep.TrainConfig(
        batch_size=BATCH,
        num_microbatches=2,
        steps=steps,
        log_every=1,
        device="cpu",
        checkpoint=CheckpointConfig(every=10 * steps),
        tables={"buddy": not args.no_buddy},
    )
    with tempfile.TemporaryDirectory() as folder:
        task = Lookups(args.rows, config)
        found = run(task, config, Session(str(Path(folder) / "run"), False, (), False))
        if detect(os.environ).rank:
            return
        rows = [r for r in read_events(found.run_dir / "events.jsonl") if r["event"] == "StepDone"]
    spent = [max(r["compute_s"] + r["communication_s"] for r in row["ranks"]) for row in rows]
    print(json.dumps({"step_s": spent[WARMUP:], "mbytes": sum(sent) / steps / 1e6}), flush=True)


def counted() -> list[int]:
    """Takes note of the bytes of all messages about rows in steps."""
    sizes: list[int] = []
    swap = exchange.swap

    @wraps(swap)
    def noted(transport: Any, sent: Tensor, counts: Any, received: Any) -> Tensor:
        sizes.append(sent.numel() * sent.itemsize)
        return swap(transport, sent, counts, received)

    exchange.swap = noted
    return sizes


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
