"""Between a training state in use and a snapshot of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.optimizer_state import DTYPES, TENSOR, OptimizerState, dtype_name
from lockstep.engine.progress import Progress
from lockstep.engine.recovery.sharded_state import whole_state
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import CheckpointError


def capture(
    train_step: TrainStep,
    model: nn.Module,
    progress: Progress,
    meta: dict[str, Any],
    state: OptimizerState,
) -> Callable[[], Snapshot]:
    """Copy the state in memory; what is returned makes a snapshot of the copies.

    Args:
        train_step: training step with the optimizer, the loss scale and the task.
        model: model that is trained.
        progress: position and history of the run.
        meta: further values for the manifest, JSON-able.
        state: state of the optimizer, already copied.
    """
    task, values = train_step.task_state.capture()
    tensors = {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
    buffers = {n: t.detach().to("cpu", copy=True) for n, t in train_step.state.unsaved.items()}
    meta = meta | {
        "progress": progress.state_dict(),
        "loss_scale": train_step.loss_scale.state_dict(),
        "optimizer_scalars": state.scalars,
        "optimizer_shared": state.shared,
        "task": values,
    }

    def make() -> Snapshot:
        optimizer = {
            f"{key}/{name}": tensor.cpu()
            for key, segments in state.flats.items()
            for name, tensor in train_step.flat.named(segments).items()
        } | {name: tensor.cpu() for name, tensor in state.tensors.items()}
        return Snapshot(progress_step, tensors, optimizer, meta, buffers, task)

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
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in snapshot.buffers:
        if name not in buffers:
            raise CheckpointError(f"{where}: is of another model: this one has no {name}")
    for name, there in (snapshot.model | snapshot.buffers).items():
        here = own[name] if name in own else buffers[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise CheckpointError(
                f"{where}: is of another model: {name} is {there.dtype} {tuple(there.shape)} "
                f"there, {here.dtype} {tuple(here.shape)} here"
            )


def check_optimizer_fits(snapshot: Snapshot, train_step: TrainStep, where: str) -> None:
    """Refuse a snapshot of another optimizer; old ones do not say all of theirs.

    A hyperparameter that only one of them has, as of another version of torch, is not compared.

    Raises:
        CheckpointError: names the first thing that differs.
    """
    here, there = train_step.flat_optimizer.description, snapshot.meta.get("optimizer", {})
    for name in [n for n in (there | here) if there]:
        in_both = name in here and name in there
        if here.get(name) != there.get(name) and (in_both or " of group " not in name):
            raise CheckpointError(
                f"{where}: was trained with another optimizer: {name} is {there.get(name)!r} "
                f"there, {here.get(name)!r} here; resume with the same optimizer or start a new run"
            )
    entries = {e.name: e for e in train_step.flat.entries}
    saved = {(n.partition("/")[0], n.partition("/")[2]): t for n, t in snapshot.optimizer.items()}
    if train_step.flat_optimizer.elementwise:
        wanted = {(key, name) for key, _ in saved for name in entries}
    else:
        scalars = snapshot.meta["optimizer_scalars"]
        wanted = {(k, n) for n, kept in scalars.items() for k, v in kept.items() if v == TENSOR}
    for key, name in [*saved, *wanted]:
        tensor = saved.get((key, name))
        if tensor is None or name not in entries:
            raise CheckpointError(f"{where}: is damaged: optimizer state {key}/{name} does not fit")
        shape, dtype = entries[name].shape, train_step.flat.segments[entries[name].segment].dtype
        if train_step.flat_optimizer.elementwise and (tensor.shape, tensor.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{where}: is damaged: optimizer state {key}/{name} is {tensor.dtype} "
                f"{tuple(tensor.shape)}, must be {dtype} {tuple(shape)}"
            )


def load_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Load a snapshot that fits into a model."""
    model.load_state_dict(snapshot.model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in snapshot.buffers.items():
        buffers[name].copy_(tensor)


class Received(NamedTuple):
    """A snapshot on its way into use.

    Attributes:
        model: tensors of the model's `state_dict` by name.
        buffers: buffers of the model that its `state_dict` leaves out, by name.
        optimizer: state of the optimizer.
        task: tensors of the task's own state by name, on the CPU.
        meta: all values that are no tensors, JSON-able.
    """

    model: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: OptimizerState
    task: dict[str, Tensor]
    meta: dict[str, Any]


def restore(
    snapshot: Snapshot | None,
    train_step: TrainStep,
    model: nn.Module,
    transport: Transport,
    root: int = 0,
) -> Progress:
    """Bring all ranks into the state of a snapshot that rank `root` has (the others pass None).

    If it is interrupted, all ranks are in the state they were in.

    Raises:
        GroupBroken: on all ranks, or on none.
    """
    return Progress.from_state_dict(
        receive(snapshot, train_step, model, transport, root)["progress"]
    )


def receive(
    snapshot: Snapshot | None,
    train_step: TrainStep,
    model: nn.Module,
    transport: Transport,
    root: int,
) -> dict[str, Any]:
    """As `restore`, but returns the snapshot's `meta`."""
    received = _receive(snapshot, train_step, model, transport, root)
    transport.agree()
    model.load_state_dict(received.model)
    for name, buffer in train_step.state.unsaved.items():
        buffer.copy_(received.buffers[name])
    train_step.flat_optimizer.load_state(received.optimizer)
    train_step.loss_scale.load_state_dict(received.meta["loss_scale"])
    train_step.state.mark()
    train_step.task_state.restore(received.task, received.meta.get("task", {}))
    train_step.watched.mark()
    return received.meta


def copy_state(
    train_step: TrainStep,
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
        nothing = OptimizerState({}, {}, {}, {})
        state = nothing if train_step.sharded else whole_state(transport, train_step)
        snapshot = capture(train_step, model, progress, meta, state)()
    return receive(snapshot, train_step, model, transport, root)


def _receive(
    snapshot: Snapshot | None,
    train_step: TrainStep,
    model: nn.Module,
    transport: Transport,
    root: int,
) -> Received:
    tensors, buffers = receive_model(snapshot, train_step, model, transport, root)
    meta = transport.gather_json(snapshot.meta if snapshot else {})[root]
    state = OptimizerState({}, {}, meta["optimizer_scalars"], meta.get("optimizer_shared", {}))
    saved = snapshot.optimizer if snapshot else {}
    if train_step.flat_optimizer.elementwise:
        keys = sorted({name.partition("/")[0] for name in saved})
        for key in transport.gather_json(keys)[root]:
            flats = state.flats[key] = [torch.zeros_like(f) for f in train_step.flat.flats]
            for name, view in train_step.flat.named(flats).items() if saved else ():
                view.copy_(saved[f"{key}/{name}"])
            for flat in flats:
                _broadcast(transport, flat, root)
    else:
        state.tensors.update(receive_named(saved, train_step, transport, root))
    task = receive_named(snapshot.task if snapshot else {}, train_step, transport, root)
    return Received(tensors, buffers, state, {n: t.cpu() for n, t in task.items()}, meta)


def receive_model(
    snapshot: Snapshot | None,
    train_step: TrainStep,
    model: nn.Module,
    transport: Transport,
    root: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model, and its buffers that are not persistent, of rank `root`'s snapshot.

    A buffer that the snapshot lacks has the value that it has on rank `root`.

    Returns:
        Both by name, as new tensors.

    Raises:
        GroupBroken: a rank was lost.
    """
    tensors = {name: torch.empty_like(own) for name, own in model.state_dict().items()}
    buffers = {name: own.clone() for name, own in train_step.state.unsaved.items()}
    sources = snapshot.model | snapshot.buffers if snapshot else {}
    for name, tensor in (tensors | buffers).items():
        tensor.copy_(sources.get(name, tensor))
        _broadcast(transport, tensor, root)
    return tensors, buffers


def receive_named(
    saved: dict[str, Tensor], train_step: TrainStep, transport: Transport, root: int
) -> dict[str, Tensor]:
    """Tensors of rank `root` by name, on all ranks, whatever their shapes and dtypes."""
    own = {name: [dtype_name(t.dtype), [*t.shape]] for name, t in saved.items()}
    received = {}
    for name, (dtype, shape) in transport.gather_json(own)[root].items():
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device=train_step.flat.flats[0].device)
        tensor.copy_(saved.get(name, tensor))
        _broadcast(transport, tensor, root)
        received[name] = tensor
    return received


def _broadcast(transport: Transport, tensor: Tensor, root: int) -> None:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    transport.broadcast(data, root)
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
