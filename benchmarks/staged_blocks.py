"""Steps of a pipeline of equal blocks, in as many stages as ranks; started by `parallel.py`.

Prints one JSON line on rank 0: seconds of each step, and a SHA-256 of the final parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import CheckpointConfig, MeshConfig, OptimizerConfig
from lockstep.front import Sitting, run
from lockstep.launchers.rank.environment import detect
from lockstep.observe import read_events, read_result
from sharded_layers import Block

TOKENS = 128
WARMUP = 2
LR = 1e-3


def arguments() -> argparse.Namespace:
    """What is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=5, help="steps")
    return parser.parse_args()


def blocks(args: argparse.Namespace) -> list[nn.Module]:
    """The same on every rank."""
    torch.manual_seed(0)
    return [Block(args.width, 8) for _ in range(args.blocks)]


def inputs(args: argparse.Namespace) -> Tensor:
    """The samples of one step, [samples, tokens, width]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(args.microbatches * args.samples, TOKENS, args.width, generator=generator)


class Staged(lockstep.Task):
    """A row of equal blocks, and the mean square of what they give."""

    def __init__(self, args: argparse.Namespace, config: lockstep.TrainConfig) -> None:
        super().__init__(config)
        self._args = args

    def build_model(self) -> lockstep.nn.Pipeline:
        """The same initial values as in the peer."""
        return lockstep.nn.Pipeline(*blocks(self._args))

    def dataset(self, split: str) -> TensorDataset | None:
        """The samples of one step."""
        return TensorDataset(inputs(self._args)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        """The mean square of the output."""
        y = model(batch[0])
        return lockstep.Loss(y.square().sum(), y.numel())


def main() -> None:
    args = arguments()
    place = detect(os.environ)
    config = lockstep.TrainConfig(
        batch_size=args.microbatches * args.samples,
        num_microbatches=args.microbatches,
        steps=WARMUP + args.repeats,
        mesh=MeshConfig(pp=place.world_size),
        optimizer=OptimizerConfig(name="sgd"),
        lr=LR,
        device="cpu",
        log_every=1,
        checkpoint=CheckpointConfig(every=WARMUP + args.repeats + 1),
    )
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        run(Staged(args, config), config, Sitting(run_dir=folder, console=False))
        if place.rank:
            return
        rows = read_events(Path(folder) / "events.jsonl")
        sha256 = read_result(Path(folder))["params_sha256"]
    seconds = [row["seconds"] for row in rows if row["event"] == "StepDone"][WARMUP:]
    print(json.dumps({"seconds": seconds, "digest": sha256[:16]}), flush=True)


if __name__ == "__main__":
    main()
