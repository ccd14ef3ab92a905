"""The state of another checkpoint for a while, as for evaluating the best one at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.events import Warned
from lockstep.engine.runtime import Runtime, everywhere, on_first
from lockstep.engine.snapshot.capture import held
from lockstep.engine.snapshot.fits import check_fits
from lockstep.engine.snapshot.restore import receive_model, receive_named
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import CheckpointError
from lockstep.nn.cutting import load_held


@contextmanager
def borrowed_state(
    root: Path, step: int, last_step: int, train_step: TrainStep, model: nn.Module, runtime: Runtime
) -> Iterator[int]:
    """Model and task with the state of a checkpoint in here, and with their own again after it.

    The optimizer keeps its state, so nothing may be trained in here. What was there before comes
    back bit for bit, also when an exception leaves the block, such as one for the loss of a rank:
    putting it back takes no communication.

    Args:
        root: folder of all checkpoints, read by rank 0 only.
        step: step of the checkpoint.
        last_step: step of the model's own state.
        train_step: training step whose buffers and task state are meant.
        model: model that is trained.
        runtime: surroundings of this process.

    Yields:
        The step of the state in here; it is `last_step`, with a warning, if the checkpoint cannot
        be read.

    Raises:
        CheckpointError: the task cannot take its state of that step; on all ranks.
        GroupBroken: a rank was lost.
    """
    transport = runtime.transport
    snapshot: Snapshot | None = None

    def read() -> str:
        nonlocal snapshot
        folder = root / listing.folder_name(step)
        try:
            found = checkpoint.read(folder)
            check_fits(found, model, str(folder))
        except CheckpointError as error:
            return str(error)
        snapshot = found
        return ""

    problem = on_first(transport, read)
    if problem:
        message = f"the state of step {last_step} is evaluated, not the best one: {problem}"
        runtime.emit(Warned(step=last_step, message=message))
        yield last_step
        return
    with train_step.parameters.whole():
        tensors, buffers = receive_model(snapshot, train_step, model, transport, 0)
        own_tensors = {n: t.detach().clone() for n, t in held(train_step, model).items()}
    named = receive_named(snapshot.task if snapshot else {}, train_step, transport, 0)
    values = transport.gather_json(snapshot.meta.get("task", {}) if snapshot else {})[0]
    own_buffers = {name: t.clone() for name, t in train_step.state.unsaved.items()}
    own_task = train_step.task_state.capture()
    tables, folder = train_step.tables, snapshot.folder if snapshot else None
    try:
        with tables.borrowed(folder) if tables is not None else nullcontext():
            _load(train_step, model, tensors, buffers)
            on_cpu = {name: tensor.cpu() for name, tensor in named.items()}
            everywhere(transport, lambda: _load_task(train_step, on_cpu, values))
            yield step
    finally:
        _load(train_step, model, own_tensors, own_buffers)
        _load_task(train_step, *own_task)


def _load(
    train_step: TrainStep, model: nn.Module, tensors: dict[str, Tensor], buffers: dict[str, Tensor]
) -> None:
    """Copy tensors into the model in place, since its parameters are views of one flat tensor."""
    with train_step.parameters.whole(gathered=False):
        load_held(model, train_step.places.own, tensors)
    for name, buffer in train_step.state.unsaved.items():
        buffer.copy_(buffers[name])
    train_step.state.mark()


def _load_task(train_step: TrainStep, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    train_step.task_state.restore(tensors, values)
    train_step.watched.mark()
