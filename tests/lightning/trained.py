"""Trains some of `modules.py`, on the ranks that run this, and prints what became of them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import lockstep as ls
from lockstep.launching.targets import configured, make_task

MODULES = Path(__file__).parent / "modules.py"
KEYS = ("epochs=3", "num_microbatches=4", "log_every=1", "checkpoint.every=0")
"""What all of them are trained with: 12 steps of 16 samples or 8."""


def task_of(name, *keys):
    """The task of a module, with its config."""
    kind, config = configured(f"{MODULES}:{name}", [*KEYS, *keys])
    return make_task(kind, config)


def trained(name, folder, *keys):
    """The result of a module's training, and its losses by step."""
    run_dir = Path(folder) / name
    result = ls.train(task_of(name, *keys), run_dir=run_dir, quiet=True)
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    return result, [float(row["loss"]) for row in rows]


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name in names:
        result, losses = trained(name, folder)
        digest = result.params_sha256
        print("\n" + json.dumps({"name": name, "sha256": digest, "losses": losses}), flush=True)
