"""Peer: DistributedDataParallel in workers of Ray Train, which starts all again after a loss."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any


def loop(config: dict[str, Any]) -> None:
    """What each worker does: from the newest checkpoint on; it writes down what it has done."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()))
    optimizer = torch.optim.Adam(model.parameters())
    rank, first = ray.train.get_context().get_world_rank(), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    with open(config["log"], "a", encoding="utf-8") as log:

        def note(**row: Any) -> None:
            log.write(json.dumps({"rank": rank, "time": time.time(), **row}) + "\n")
            log.flush()

        note(first=first, raylet=int(os.environ["RAY_RAYLET_PID"]))
        for step in range(first + 1, config["steps"] + 1):
            time.sleep(config["step_s"])
            optimizer.zero_grad()
            model(torch.ones(8, 64)).square().sum().backward()
            optimizer.step()
            note(step=step)
            if step % config["every"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, Path(folder) / "state.pt")
                kept = Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=kept)


def main() -> None:
    """Train on two workers of the cluster at RAY_ADDRESS."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty folder")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True, help="seconds of a step's work")
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    args = parser.parse_args()

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = {"log": str(args.folder / "log"), "steps": args.steps, "step_s": args.step_s}
    TorchTrainer(
        loop,
        train_loop_config={**config, "every": args.every},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(args.folder), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    main()
