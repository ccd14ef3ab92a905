"""Lockstep with a loss over the whole batch, as `peers/pairs_ddp.py`; prints a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import CheckpointConfig, DataConfig, OptimizerConfig
from lockstep.config.sections import BatchLossConfig
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect
from lockstep.observe import read_events
from peers.pairs import BATCH, LR, contrast, encoder, views

Pair = tuple[Tensor, Tensor]


class Pairs(lockstep.Task):
    """Each pair of views is told from all others of the batch."""

    def build_model(self) -> nn.Module:
        """The same initial values as in the peer."""
        return encoder()

    def dataset(self, split: str) -> TensorDataset | None:
        """Data in memory; nothing to evaluate on."""
        return TensorDataset(*views()) if split == "train" else None

    def outputs(self, model: nn.Module, batch: Pair) -> Pair:
        """Of both views of a microbatch."""
        one, other = model(torch.cat(batch)).chunk(2)
        return one, other

    def batch_loss(self, outputs: Pair, batch: Pair) -> lockstep.Loss:
        """Of the whole batch."""
        return lockstep.Loss.mean(contrast(*outputs), len(outputs[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=5, help="the first is not timed")
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    total = args.steps * args.repeats
    config = lockstep.TrainConfig(
        batch_size=BATCH,
        num_microbatches=args.num_microbatches,
        steps=total,
        lr=LR,
        optimizer=OptimizerConfig(name="adam"),
        data=DataConfig(shuffle=False),
        batch_loss=BatchLossConfig(recompute=args.recompute),
        log_every=args.steps,
        checkpoint=CheckpointConfig(every=total + 1),
    )
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        finished = run(Pairs(config), config, Session(run_dir=folder, console=False))
        if detect(os.environ).rank:
            return
        rows = read_events(Path(folder) / "events.jsonl")
    reports = [row for row in rows if row["event"] == "StepDone"]
    step_s = statistics.median(row["seconds"] / row["num_steps"] for row in reports[1:])
    result = {
        "samples_per_s": BATCH / step_s,
        "step_s": step_s,
        "losses": [row["loss"] for row in reports],
        "digest": finished.params_sha256[:16],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
