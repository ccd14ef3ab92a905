"""Trains many configs one after the other on the ranks it is started on; rank 0 prints SHA-256s.

Arguments: a folder for run directories, then the names of the configs (all if none is given).
"""

import json
import os
import sys
import warnings
from pathlib import Path

from lockstep.config import override
from lockstep.launching import api as front
from lockstep.launching.api import Session
from lockstep.launching.rank.environment import detect

sys.path.insert(0, str(Path(__file__).parent))
from tasks import Everything, EverythingConfig

USER = [
    "optimizer.name=adamw", "optimizer.weight_decay=0.05", "clip_norm=0.5",
    "schedule.name=cosine", "schedule.warmup_steps=3", "precision.dtype=bf16",
]  # fmt: skip
CASES = {
    "plain": [],
    "user": USER,
    "user-sharded": [*USER, "optimizer.sharded=true"],
    "sgd-momentum": ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true"],
    "fp16": ["precision.dtype=fp16", "precision.growth_interval=4", "steps=12"],
    "float64": ["dtype=float64", "clip_norm=1"],
    "one-microbatch": ["num_microbatches=1", "steps=6"],
    "seven-microbatches": ["num_microbatches=7"],
    "groups": ["groups=true", "clip_norm=1"],
    "groups-sharded": ["groups=true", "clip_norm=1", "optimizer.sharded=true"],
    "unused-parameters": ["gate=true"],
    "augment": ["augment=true", "steps=8"],
    "augment-workers": ["augment=true", "steps=8", "data.num_workers=2"],
    "sliced": ["wide=900", "steps=5", "bucket_bytes=300000"],
    "sliced-sharded": ["wide=900", "steps=5", "optimizer.sharded=true"],
    "recompute": ["activation_checkpointing=['0','1']"],
    "early-stopping": ["early_stopping.patience=2", "lr=0.2", "eval_every=2", "steps=40"],
    "plateau": ["schedule.name=plateau", "schedule.patience=0", "lr=0.2", "eval_every=2"],
    "step-decay": ["schedule.name=step", "schedule.step_size=4", "schedule.gamma=0.5"],
    "teacher": ["teacher=true", "precision.dtype=bf16"],
    "teacher-sharded": ["teacher=true", "precision.dtype=bf16", "optimizer.sharded=true"],
    "hooked": ["hooked=3", "eval_every=2", "checkpoint.every=4"],
    "hooked-sharded": ["hooked=3", "eval_every=3", "optimizer.sharded=true"],
    "linear": ["schedule.name=linear", "schedule.warmup_steps=14", "digest_every=3"],
}


def main() -> None:
    folder, *names = sys.argv[1:]
    environment = detect(os.environ)
    found = {}
    for name in names or CASES:
        config = override(EverythingConfig(), CASES[name], name)
        run_dir = Path(folder) / f"{environment.launcher}-{environment.world_size}-{name}"
        finished = front.run(Everything(config), config, Session(str(run_dir), console=False))
        found[name] = [finished.params_sha256, finished.step, finished.metrics]
    if environment.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
