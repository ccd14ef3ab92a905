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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import CheckpointConfig, OptimizerConfig
from lockstep.front import Sitting, run
from lockstep.launchers.rank.environment import detect
from lockstep.observe import read_events, read_result

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32, help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=3, help="steps")
    parser.add_argument("--sharding", default="none")
    return parser.parse_args()


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


class Row(lockstep.Task):
    """A row of blocks, and the mean square of what they give."""

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
        sharding=args.sharding,
        optimizer=OptimizerConfig(name="adam", buddy=False),
        lr=LR,
        device="cpu",
        log_every=1,
        checkpoint=CheckpointConfig(every=WARMUP + args.repeats + 1),
    )
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        run(Row(args, config), config, Sitting(run_dir=folder, console=False))
        peak = greatest_peak(place.rank, place.world_size)
        if place.rank:
            return
        rows = read_events(Path(folder) / "events.jsonl")
        sha256 = read_result(Path(folder))["params_sha256"]
    seconds = [row["seconds"] for row in rows if row["event"] == "StepDone"][WARMUP:]
    found = {"seconds": seconds, "peak_bytes": peak, "digest": sha256[:16]}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
