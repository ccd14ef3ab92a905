"""Steps of the published Sudoku model, in Lockstep or in a plain loop; started by `hrm.py`.

Prints one JSON line on rank 0: seconds of each step, and a SHA-256 of the final parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lockstep.config import CheckpointConfig
from lockstep.engine.digests import model_digest
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect
from lockstep.observe import read_events
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.task import Hrm

WARMUP = 2


def arguments() -> argparse.Namespace:
    """What is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="a loop of one's own")
    parser.add_argument("--preset", default="sudoku-extreme-hrm")
    parser.add_argument("--slots", type=int, default=16, help="puzzles of a global batch")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def config(args: argparse.Namespace) -> HrmConfig:
    """The published model on few puzzles, in float32."""
    steps = WARMUP + args.steps
    return HrmConfig(
        preset=args.preset,
        batch_size=args.slots,
        num_microbatches=2,
        num_train=4 * args.slots,
        num_val=1,
        augment=0,
        clues=50,
        steps=steps,
        eval_every=steps,
        log_every=1,
        ema=0.0,
        precision={"dtype": "fp32"},
        device="cpu",
        checkpoint=CheckpointConfig(every=10 * steps),
    )


def in_lockstep(task: Hrm) -> dict[str, Any]:
    """The engine's own clock: without data, evaluations and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        # Where several ranks write, the first one's folder is all ranks'.
        found = run(task, task.config, Session(str(path), False, (), False))
        if detect(os.environ).rank:
            return {}
        rows = [r for r in read_events(found.run_dir / "events.jsonl") if r["event"] == "StepDone"]
    spent = [max(r["compute_s"] + r["communication_s"] for r in row["ranks"]) for row in rows]
    return {"step_s": spent[WARMUP:], "digest": found.params_sha256[:16]}


def in_a_loop(task: Hrm) -> dict[str, Any]:
    """Slots that go on, a batch in one go, an optimizer: what published code does in a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    inputs, labels = task.dataset("train").tensors
    size = task.config.batch_size
    carry: Any = None
    spent = []
    for step in range(task.config.steps):
        place = step * size % (len(inputs) - size + 1)
        batch = inputs[place : place + size], labels[place : place + size]
        started = perf_counter()
        carry = carry or task.carry(model, batch)
        loss, carry = task.loss(model, batch, carry)
        (loss.sum / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        spent.append(perf_counter() - started)
    return {"step_s": spent[WARMUP:], "digest": model_digest(model)[:16]}


def main() -> None:
    args = arguments()
    task = Hrm(config(args))
    found = in_a_loop(task) if args.plain else in_lockstep(task)
    if found:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
