"""Steps of a row of blocks with parameters in slices, or without; started by `slices.py`.

Prints one JSON line on rank 0: seconds of each step, the greatest peak of memory of a rank in
bytes, and a SHA-256 of the final parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import lockstep
from block_row import Row, parser, timed
from lockstep.comm.mailbox import HostTransport
from lockstep.config import CheckpointConfig, OptimizerConfig
from lockstep.launching.rank.environment import detect

WARMUP = 1
LR = 1e-4


class Residual(nn.Module):
    """x + relu(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        y: Tensor = x + self.linear(x).relu()
        return y


def arguments() -> argparse.Namespace:
    """What is measured."""
    asked = parser(__doc__, width=2048, blocks=24, samples=32, repeats=3)
    asked.add_argument("--sharding", default="none")
    asked.add_argument("--waits", action="store_true", help="gather no block ahead")
    asked.add_argument("--no-peak", action="store_true", help="of ranks on several hosts")
    return asked.parse_args()


def blocks(args: argparse.Namespace) -> list[nn.Module]:
    """The same on every rank."""
    torch.manual_seed(0)
    return [Residual(args.width) for _ in range(args.blocks)]


def inputs(args: argparse.Namespace) -> Tensor:
    """The samples of one step, [samples, width]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(args.microbatches * args.samples, args.width, generator=generator)


def greatest_peak(rank: int, world_size: int) -> int:
    """The greatest peak of memory of all ranks of this host in bytes, on rank 0."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("MASTER_PORT", "")
    folder = Path(tempfile.gettempdir()) / f"lockstep-peaks-{run_id}-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"{rank}.tmp").write_text(str(own))
    (folder / f"{rank}.tmp").rename(folder / str(rank))
    if rank:
        return own
    files = [folder / str(number) for number in range(world_size)]
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    peak = max(int(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    folder.rmdir()
    return peak


def main() -> None:
    args = arguments()
    place = detect(os.environ)
    if args.waits:
        mock.patch.object(HostTransport, "_is_long", return_value=False).start()
    config = lockstep.TrainConfig(
        batch_size=args.microbatches * args.samples,
        num_microbatches=args.microbatches,
        steps=WARMUP + args.repeats,
        sharding=args.sharding,
        optimizer=OptimizerConfig(name="adam", buddy=False),
        lr=LR,
        device="cpu",
        log_every=1,
        checkpoint=CheckpointConfig(every=WARMUP + args.repeats + 1),
    )
    found = timed(Row(config, lambda: blocks(args), inputs(args)), WARMUP)
    peak = 0 if args.no_peak else greatest_peak(place.rank, place.world_size)
    if place.rank == 0:
        print(json.dumps({**found, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
