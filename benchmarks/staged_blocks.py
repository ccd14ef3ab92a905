"""Steps of a pipeline of equal blocks, in as many stages as ranks; started by `parallel.py`.

Prints one JSON line on rank 0: seconds of each step, and a SHA-256 of the final parameters.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from torch import Tensor, nn

import lockstep
from block_row import Row, parser, timed
from lockstep.config import CheckpointConfig, MeshConfig, OptimizerConfig
from lockstep.launching.rank.environment import detect
from sharded_layers import Block

TOKENS = 128
WARMUP = 2
LR = 1e-3


def arguments() -> argparse.Namespace:
    """What is measured."""
    asked = parser(__doc__, width=256, blocks=8, samples=4, repeats=5)
    asked.add_argument("--interleave", type=int, default=1, help="stages of each rank")
    return asked.parse_args()


def blocks(args: argparse.Namespace) -> list[nn.Module]:
    """The same on every rank."""
    torch.manual_seed(0)
    return [Block(args.width, 8) for _ in range(args.blocks)]


def inputs(args: argparse.Namespace) -> Tensor:
    """The samples of one step, [samples, tokens, width]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(args.microbatches * args.samples, TOKENS, args.width, generator=generator)


def main() -> None:
    args = arguments()
    place = detect(os.environ)
    config = lockstep.TrainConfig(
        batch_size=args.microbatches * args.samples,
        num_microbatches=args.microbatches,
        steps=WARMUP + args.repeats,
        mesh=MeshConfig(pp=place.world_size, interleave=args.interleave),
        optimizer=OptimizerConfig(name="sgd"),
        lr=LR,
        device="cpu",
        log_every=1,
        checkpoint=CheckpointConfig(every=WARMUP + args.repeats + 1),
    )
    found = timed(Row(config, lambda: blocks(args), inputs(args)), WARMUP)
    if place.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
