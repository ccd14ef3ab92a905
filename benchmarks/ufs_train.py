"""Lockstep training the recipe `ufs`, timed by the engine; one JSON line like the peers'."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lockstep.config import CheckpointConfig
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect
from lockstep.observe import read_events
from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.task import Ufs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps per repeat")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--repeats", type=int, default=5, help="the median is printed")
    parser.add_argument("--target", type=float, help="validation loss to train to, by default keys")
    args = parser.parse_args()
    place = detect(os.environ)
    with tempfile.TemporaryDirectory() as folder:  # rank 0 uses its own, the others use none
        config = UfsConfig() if args.target else speed(args, place.world_size)
        run(Ufs(config), config, Session(run_dir=folder, console=False))
        if place.rank:
            return
        rows = read_events(Path(folder) / "events.jsonl")
    if args.target:
        print(json.dumps(time_to(args.target, rows)), flush=True)
        return
    reports = [row for row in rows if row["event"] == "StepDone"][-args.repeats :]
    step_s = statistics.median(row["seconds"] / row["num_steps"] for row in reports)
    samples = statistics.median(row["samples"] / row["seconds"] for row in reports)
    result = {"world_size": place.world_size, "samples_per_s": samples, "step_s": step_s}
    print(json.dumps(result), flush=True)


def speed(args: argparse.Namespace, world_size: int) -> UfsConfig:
    """1,000 samples and one microbatch a rank; the engine reports every `steps` steps."""
    total = args.steps * (-(-args.warmup // args.steps) + args.repeats)
    return UfsConfig(
        mask_mode="both",
        squash=False,
        batch_size=1000 * world_size,
        num_microbatches=world_size,
        steps=total,
        eval_every=total + 1,
        log_every=args.steps,
        device="cpu",
        checkpoint=CheckpointConfig(every=total + 1),
    )


def time_to(target: float, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Steps and seconds of training and evaluation until the validation loss is met."""
    seconds = 0.0
    for row in rows:
        if row["event"] in ("StepDone", "Evaluated"):
            seconds += row["seconds"]
        if row["event"] == "Evaluated" and row["metrics"]["loss"] <= target:
            return {"step": float(row["step"]), "seconds": seconds}
    raise SystemExit(f"the validation loss never was {target}")


if __name__ == "__main__":
    main()
