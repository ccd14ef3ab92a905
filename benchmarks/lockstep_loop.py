"""Lockstep on the peers' models: a task and a config as a user writes them, and the engine's clock.

Run it with python or mpirun (or any other launcher); it prints one JSON line like the peers'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import CheckpointConfig, ComputeConfig, OptimizerConfig, PrecisionConfig
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect
from lockstep.observe import read_events
from peers.models import MODELS, workload

NUM_BATCHES = 16
"""Global batches the data set holds, as in the peers; it is passed over again and again."""


class Training(lockstep.Task):
    """One of the peers' models."""

    def __init__(self, model: str, num_samples: int, config: lockstep.TrainConfig) -> None:
        super().__init__(config)
        self._work = workload(model)
        self._sum = F.mse_loss if model == "mlp_small" else F.cross_entropy
        self._num_samples = num_samples

    def build_model(self) -> nn.Module:
        """The same initial values as in the peers."""
        return self._work.model

    def dataset(self, split: str) -> TensorDataset | None:
        """Random data in memory; nothing to evaluate on."""
        return TensorDataset(*self._work.data(self._num_samples)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        """The peers' loss, as a sum: over tokens, images or rows."""
        inputs, targets = batch
        outputs: Tensor = model(inputs)
        if outputs.dim() == 3:
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
        return lockstep.Loss(self._sum(outputs, targets, reduction="sum"), len(targets))


def arguments() -> argparse.Namespace:
    """The command line: the peers' arguments, and some of the engine's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp_small")
    parser.add_argument("--batch", type=int, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=200, help="steps per repeat")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--repeats", type=int, default=5, help="the median is printed")
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--num-microbatches", type=int, help="as many as ranks by default")
    parser.add_argument("--checkpoint-every", type=int, help="steps; none by default")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or accelerator")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of autocast")
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel by itself")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    place = detect(os.environ)
    world_size = place.world_size
    batch = args.batch or workload(args.model).batch
    # The engine reports every `steps` steps; the reports that hold the warm-up are left out.
    num_warm = -(-args.warmup // args.steps)
    total = args.steps * (num_warm + args.repeats)
    config = lockstep.TrainConfig(
        batch_size=batch * world_size,
        num_microbatches=args.num_microbatches or world_size,
        steps=total,
        optimizer=OptimizerConfig(name="adam"),
        threads=args.threads,
        device=args.device,
        compute=ComputeConfig(graphs=False if args.no_graphs else "auto"),
        precision=PrecisionConfig(dtype=args.dtype),
        log_every=args.steps,
        checkpoint=CheckpointConfig(every=args.checkpoint_every or total + 1),
    )
    task = Training(args.model, NUM_BATCHES * config.batch_size, config)
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        run(task, config, Session(run_dir=folder, console=False))
        if place.rank:
            return
        rows = read_events(Path(folder) / "events.jsonl")
    reports = [row for row in rows if row["event"] == "StepDone"][num_warm:]
    seconds = [row["seconds"] / row["num_steps"] for row in reports]
    step_s = statistics.median(seconds)
    result = {
        "name": "lockstep",
        "world_size": world_size,
        "batch_per_rank": batch,
        "model": args.model,
        "steps": args.steps,
        "samples_per_s": config.batch_size / step_s,
        "step_s": step_s,
        "step_s_range": [min(seconds), max(seconds)],
        "threads": torch.get_num_threads(),
        "num_microbatches": config.num_microbatches,
        "split_s": [times(reports, rank, len(reports) * args.steps) for rank in range(world_size)],
    }
    if args.checkpoint_every:
        result["checkpoints"] = [
            {key: row[key] for key in ("num_bytes", "stall_s", "write_s")}
            for row in rows
            if row["event"] == "Checkpointed" and row["step"] < total
        ]
    print(json.dumps(result), flush=True)


def times(reports: list[dict[str, Any]], rank: int, num_steps: int) -> dict[str, float]:
    """Where a rank's time went, in seconds a step."""
    kinds = ("compute_s", "communication_s", "data_s", "checkpoint_s")
    return {k: sum(r["ranks"][rank][k] for r in reports) / num_steps for k in kinds}


if __name__ == "__main__":
    main()
