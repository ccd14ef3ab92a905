"""Between a training state in use and a snapshot of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.errors import CheckpointError
from lockstep.train.checkpoint import Snapshot
from lockstep.train.progress import Progress
from lockstep.train.slices import SteppedState, whole_state
from lockstep.train.step import Step
from lockstep.train.task_state import capture_task, restore_task


def capture(
    step: Step,
    model: nn.Module,
    progress: Progress,
    meta: dict[str, Any],
    state: SteppedState,
) -> Callable[[], Snapshot]:
    """Copy the state in memory; what is returned makes a snapshot of the copies.

    Args:
        step: of the run.
        model: of the run.
        progress: of the run.
        meta: what else is to be kept.
        state: of the optimizer, already copied.
    """
    flats, scalars = state
    task, values = capture_task(step.task)
    tensors = {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
    meta = meta | {
        "progress": progress.to_json(),
        "loss_scale": [step.loss_scale.value, step.loss_scale.good_steps],
        "optimizer_scalars": scalars,
        "task": values,
    }

    def make() -> Snapshot:
        optimizer = {
            f"{key}/{name}": tensor.cpu()
            for key, segments in flats.items()
            for name, tensor in step.flat.named(segments).items()
        }
        return Snapshot(progress_step, tensors, optimizer, meta, task)

    progress_step = progress.step
    return make


def check_fits(snapshot: Snapshot, model: nn.Module, where: str) -> None:
    """Refuse a snapshot of another model.

    Raises:
        CheckpointError: names the first parameter or buffer that differs.
    """
    own = model.state_dict()
    for name in dict.fromkeys([*own, *snapshot.model]):
        if name not in snapshot.model:
            raise CheckpointError(f"{where}: is of another model: it has no {name}")
        if name not in own:
            raise CheckpointError(f"{where}: is of another model: this one has no {name}")
        here, there = own[name], snapshot.model[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise CheckpointError(
                f"{where}: is of another model: {name} is {there.dtype} {tuple(there.shape)} "
                f"there, {here.dtype} {tuple(here.shape)} here"
            )


class Received(NamedTuple):
    """A snapshot on its way into use.

    Attributes:
        model: its tensors by name.
        flats: state of the optimizer, laid out as the parameters.
        task: tensors of the task's own state.
        meta: the rest.
    """

    model: dict[str, Tensor]
    flats: dict[str, list[Tensor]]
    task: dict[str, Tensor]
    meta: dict[str, Any]


def restore(
    snapshot: Snapshot | None, step: Step, model: nn.Module, transport: Transport, root: int = 0
) -> Progress:
    """Bring all ranks into the state of a snapshot that rank `root` has (the others pass None).

    If it is interrupted, all ranks are in the state they were in.

    Raises:
        GroupBroken: on all ranks, or on none.
    """
    return Progress.from_json(receive(snapshot, step, model, transport, root)["progress"])


def receive(
    snapshot: Snapshot | None, step: Step, model: nn.Module, transport: Transport, root: int
) -> dict[str, Any]:
    """As `restore`, but returns the snapshot's `meta`."""
    received = _receive(snapshot, step, model, transport, root)
    transport.agree()
    model.load_state_dict(received.model)
    step.stepper.load_state(received.flats, received.meta["optimizer_scalars"])
    step.loss_scale.value, step.loss_scale.good_steps = received.meta["loss_scale"]
    step.state.mark()
    restore_task(step.task, received.task, received.meta.get("task", {}))
    return received.meta


def copy_state(
    step: Step,
    model: nn.Module,
    progress: Progress,
    meta: dict[str, Any],
    transport: Transport,
    root: int,
) -> dict[str, Any]:
    """Bring all ranks into the state rank `root` is in, as `restore` does.

    The state of a sharded optimizer is left out, and lost.

    Returns:
        The root's `meta`, and its progress.
    """
    snapshot = None
    if transport.rank == root:
        state = SteppedState({}, {}) if step.sharded else whole_state(transport, step)
        snapshot = capture(step, model, progress, meta, state)()
    return receive(snapshot, step, model, transport, root)


def _receive(
    snapshot: Snapshot | None, step: Step, model: nn.Module, transport: Transport, root: int
) -> Received:
    tensors = {name: torch.empty_like(own) for name, own in model.state_dict().items()}
    for name, tensor in tensors.items():
        if snapshot is not None:
            tensor.copy_(snapshot.model[name])
        _broadcast(transport, tensor, root)
    meta: dict[str, Any] = transport.gather_json(snapshot.meta if snapshot else None)[root]
    keys = sorted({n.partition("/")[0] for n in snapshot.optimizer}) if snapshot else []
    flats = {}
    for key in transport.gather_json(keys)[root]:
        flats[key] = [torch.zeros_like(f) for f in step.flat.flats]
        if snapshot is not None:
            for name, view in step.flat.named(flats[key]).items():
                view.copy_(snapshot.optimizer[f"{key}/{name}"])
        for flat in flats[key]:
            _broadcast(transport, flat, root)
    task = _receive_task(snapshot, step, transport, root)
    return Received(tensors, flats, task, meta)


def _receive_task(
    snapshot: Snapshot | None, step: Step, transport: Transport, root: int
) -> dict[str, Tensor]:
    kinds = [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape)]
        for name, t in (snapshot.task if snapshot else {}).items()
    ]
    tensors = {}
    for name, dtype, shape in transport.gather_json(kinds)[root]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=step.flat.flats[0].device)
        if snapshot is not None:
            tensor.copy_(snapshot.task[name])
        _broadcast(transport, tensor, root)
        tensors[name] = tensor.cpu()
    return tensors


def _broadcast(transport: Transport, tensor: Tensor, root: int) -> None:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    transport.broadcast(data, root)
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
