"""What a task's model and optimizer are made of, found by building them here."""

from __future__ import annotations

import torch

from lockstep.config import TrainConfig
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.optimizer.kinds import is_elementwise
from lockstep.engine.step.memory import Needs
from lockstep.engine.step.model import built, trainable_groups
from lockstep.engine.task import Task
from lockstep.nn.cutting import shards_of, units_of
from lockstep.nn.pipeline import Pipeline
from lockstep.planning.facts import Anatomy
from lockstep.targets import make_task


def anatomy(kind: type[Task], config: TrainConfig) -> Anatomy:
    """Build model and optimizer, and count.

    Raises:
        LockstepError: one of them cannot work.
    """
    model, compute, optimizer = built(make_task(kind, config), config, torch.device("cpu"))
    shards, is_pipeline = shards_of(model), isinstance(model, Pipeline)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    flat = FlatTensors(
        trainable_groups(model, optimizer), "parameter", shards, units_of(model),
        by_block=is_pipeline,
    )  # fmt: skip
    needs = Needs(config, flat, optimizer, can_regroup=False)
    return Anatomy(
        num_parameters=num_parameters,
        gradient_bytes=needs.parameters,
        largest_bytes=needs.largest,
        state_bytes=needs.states,
        num_blocks=len(model) if isinstance(model, Pipeline) else 1,
        num_shards=config.num_shards if shards else 1,
        is_elementwise=is_elementwise(optimizer),
        has_tables=bool(compute.lookups.tables),
    )
