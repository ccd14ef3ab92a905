"""A row of blocks trained by Lockstep, which `sliced_blocks.py` and `staged_blocks.py` time."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect
from lockstep.observe import read_events, read_result


class Row(lockstep.Task):
    """A row of blocks, and the mean square of what they give.

    Args:
        config: of the run.
        blocks: makes them with initial values, the same on every rank.
        samples: those of one step, of shape [samples, …].
    """

    def __init__(
        self,
        config: lockstep.TrainConfig,
        blocks: Callable[[], Sequence[nn.Module]],
        samples: Tensor,
    ) -> None:
        super().__init__(config)
        self._blocks = blocks
        self._samples = samples

    def build_model(self) -> lockstep.nn.Pipeline:
        """The row."""
        return lockstep.nn.Pipeline(*self._blocks())

    def dataset(self, split: str) -> TensorDataset | None:
        """The samples of one step."""
        return TensorDataset(self._samples) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        """The mean square of the output."""
        y = model(batch[0])
        return lockstep.Loss(y.square().sum(), y.numel())


def parser(
    doc: str | None, width: int, blocks: int, samples: int, repeats: int
) -> argparse.ArgumentParser:
    """What is measured, and how much of it unless it is said."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--width", type=int, default=width)
    made.add_argument("--blocks", type=int, default=blocks)
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument("--samples", type=int, default=samples, help="of a microbatch")
    made.add_argument("--repeats", type=int, default=repeats, help="steps")
    return made


def timed(row: Row, warmup: int) -> dict[str, Any]:
    """Train; returns seconds of each step after `warmup`, and a digest, on rank 0."""
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        run(row, row.config, Session(run_dir=folder, console=False))
        if detect(os.environ).rank:
            return {}
        rows = read_events(Path(folder) / "events.jsonl")
        sha256 = read_result(Path(folder))["params_sha256"]
    seconds = [row["seconds"] for row in rows if row["event"] == "StepDone"][warmup:]
    return {"seconds": seconds, "digest": sha256[:16]}
