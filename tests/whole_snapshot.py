"""What a checkpoint would hold, on every rank."""

from __future__ import annotations

from typing import Any

from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.share import gathered
from lockstep.engine.recovery.leader import numbers_of_state
from lockstep.engine.run.progress import Progress
from lockstep.engine.snapshot.capture import ScatteredState, capture
from lockstep.engine.step.train_step import TrainStep


def whole_snapshot(train_step: TrainStep, step: int, meta: dict[str, Any]) -> Snapshot:
    """A collective of all ranks."""
    progress = Progress(step=step)
    if not train_step.shares_state:
        return capture(train_step, progress, meta, train_step.flat_optimizer.state())()
    state = numbers_of_state(train_step)
    snapshot = capture(train_step, progress, meta, state, is_scattered=True)()
    scattered = ScatteredState(train_step, sorted(state.flats))
    world, device = train_step.placement.world, train_step.flat.flats[0].device
    for own, tensors in (
        (snapshot.model, scattered.model),
        (snapshot.optimizer, scattered.optimizer),
    ):
        everything = [list(tensors.values())] * world.size
        copies = (tensor.clone() for tensor in gathered(world, everything, device))
        own |= dict(zip(tensors, copies, strict=True))
    return snapshot
