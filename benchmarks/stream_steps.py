"""Lockstep on a stream of JSON lines, as `peers/json_ddp.py`; prints a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

from torch import Tensor, nn

import lockstep
from lockstep.config import CheckpointConfig, DataConfig, OptimizerConfig
from lockstep.launching.rank.environment import detect
from peers.json_lines import (
    BATCH,
    LINES,
    LR,
    MICROBATCHES,
    NUM_FILES,
    bytes_read,
    classifier,
    step_s,
    stream,
    tensors,
)


class Lines(lockstep.Task):
    """A class for each line."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def build_model(self) -> nn.Module:
        """The same initial values as in the peer."""
        return classifier()

    def dataset(self, split: str) -> Any:
        """The lines; nothing to evaluate on."""
        return stream(self._folder) if split == "train" else None

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        """As in the peer."""
        return tensors(samples)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        """Cross-entropy."""
        x, y = batch
        return lockstep.Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--shards", type=int, default=0, help="data.stream_shards")
    args = parser.parse_args()
    total = NUM_FILES * LINES // BATCH
    config = lockstep.TrainConfig(
        batch_size=BATCH,
        num_microbatches=MICROBATCHES,
        steps=total,
        lr=LR,
        optimizer=OptimizerConfig(name="adam"),
        data=DataConfig(shuffle=False, stream_shards=args.shards),
        checkpoint=CheckpointConfig(every=total + 1),
    )
    ends = []
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        for _ in lockstep.steps(Lines(args.folder), config, run_dir=f"{folder}/run", quiet=True):
            ends.append(time.perf_counter())
        read = bytes_read()
    if detect(os.environ).rank == 0:
        print(json.dumps({"step_s": step_s(ends), "bytes": read}), flush=True)


if __name__ == "__main__":
    main()
