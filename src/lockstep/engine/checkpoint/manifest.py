"""What the manifest of a checkpoint says of its run, and whether this one has the same data."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.snapshot.resumable import SamplerMeta
from lockstep.engine.tables.files import described
from lockstep.engine.task.asked import Asked
from lockstep.errors import CheckpointError


def facts_of(
    config: TrainConfig, transport: Transport, parts: Parts, asked: Asked | None, step: int
) -> dict[str, Any]:
    """What the manifest of a checkpoint says beside the state.

    Args:
        config: config of the run.
        transport: the group of ranks.
        parts: parts of the run.
        asked: what the task's code has read of the run's length, if that is noted.
        step: committed optimizer steps.
    """
    sampler = parts.sampler
    return {
        "config": config.model_dump(mode="json"),
        "config_hash": config.hash,
        "sampler": {
            "num_samples": sampler.num_samples,
            "data_digest": parts.data_digest,
            "task_digest": parts.task_digest,
            "epoch": sampler.epoch(step),
            "pass_starts": list(parts.loader.pass_starts),
        },
        "optimizer": parts.train_step.flat_optimizer.description,
        "tables": described(parts.compute.lookups.tables),
        **({} if asked is None else {"asked": sorted(asked.names)}),
        "saved_at": time.time(),
        "layout": {
            "world_size": transport.size,
            "pp": parts.places.mesh.pp,
            "tp": parts.places.mesh.tp,
            "transport": transport.name,
        },
        "rounding": parts.rounding._asdict(),
        "versions": {
            "lockstep": version("lockstep-train"),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def check_data(there: SamplerMeta, parts: Parts, where: str) -> None:
    """Refuse a checkpoint that was trained on other data.

    Args:
        there: what its manifest says of the data.
        parts: parts of this run.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: saying what differs.
    """
    here = parts.sampler.num_samples
    if there.num_samples != here:
        raise CheckpointError(
            f"{where}: was trained on {there.num_samples} samples, the dataset has {here} "
            "now; resume with the same data or start a new run"
        )
    if there.data_digest != parts.data_digest:
        raise CheckpointError(
            f"{where}: was trained on other data: the first microbatch of the dataset has "
            "changed; resume with the same data or start a new run"
        )
    if there.task_digest not in (None, parts.task_digest):
        raise CheckpointError(
            f"{where}: was trained on other data: some samples have changed; resume with the "
            "same data or start a new run"
        )
