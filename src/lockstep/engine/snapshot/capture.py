"""Taking a snapshot of a training state in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.engine.carry.carries import Held, named_tensors
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.run.progress import Progress
from lockstep.engine.snapshot.whole_tensors import WholeTensors
from lockstep.engine.step.train_step import TrainStep
from lockstep.nn.cutting import (
    held_tensors,
    joined_by_name,
)


def capture(
    train_step: TrainStep,
    model: nn.Module,
    progress: Progress,
    meta: dict[str, Any],
    state: OptimizerState,
    whole: WholeTensors | None = None,
    carries: Held | None = None,
) -> Callable[[], Snapshot]:
    """Copy the state in memory; what is returned makes a snapshot of the copies.

    Args:
        train_step: training step with the optimizer, the loss scale and the task.
        model: model that is trained.
        progress: position and history of the run.
        meta: further values for the manifest, JSON-able.
        state: state of the optimizer, already copied.
        whole: tensors of model and optimizer, if other ranks hold some of them. Without it, the
            snapshot of a model in shards has what this rank holds.
        carries: what all microbatches carry; None if they carry nothing.
    """
    task, values = train_step.task_state.capture()
    tensors = whole.model if whole else _copied(held(train_step, model))
    buffers = {n: t.detach().to("cpu", copy=True) for n, t in train_step.state.unsaved.items()}
    carry: dict[str, Tensor] = {}
    if carries is not None:
        carry, structures = named_tensors(carries)
        meta = meta | {"carry": structures}
    meta = meta | {
        "progress": progress.state_dict(),
        "loss_scale": train_step.loss_scale.state_dict(),
        "optimizer_scalars": state.scalars,
        "optimizer_shared": state.shared,
        "task": values,
    }

    def make() -> Snapshot:
        optimizer = whole.optimizer if whole else _named(train_step, state)
        return Snapshot(progress_step, tensors, optimizer, meta, buffers, task, carry)

    progress_step = progress.step
    return make


def held(train_step: TrainStep, model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank has; whole ones by their own names."""
    places = train_step.places
    return held_tensors(model, places.own) if places.is_split else dict(model.state_dict())


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _named(train_step: TrainStep, state: OptimizerState) -> dict[str, Tensor]:
    """An optimizer's tensors by "key/parameter", on the CPU."""
    optimizer = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    shards = {} if train_step.places.is_split else train_step.flat.shards
    for key, segments in state.flats.items():
        for name, tensor in joined_by_name(train_step.flat.named(segments), shards):
            optimizer[f"{key}/{name}"] = tensor.cpu()
    return optimizer
