"""Bringing ranks into the state of a snapshot, or of another rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.optimizer.optimizer_state import DTYPES, OptimizerState, dtype_name
from lockstep.engine.run.progress import Progress
from lockstep.engine.snapshot.capture import capture, held
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.tables.files import load_whole
from lockstep.engine.tables.lookups import tables_of
from lockstep.nn.cutting import (
    Shard,
    every_tensor,
    found,
    load_held,
    shards_of,
)


def load_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Load a snapshot that fits into a model, which then has all rows of its tables.

    Raises:
        CheckpointError: the rows of a table cannot be read.
    """
    model.load_state_dict(snapshot.model)
    tables = tables_of(model)
    if tables:
        assert snapshot.folder is not None, "it was read from disk"
        load_whole(tables, snapshot.folder, next(iter(model.parameters())).device)
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
    with_optimizer: bool = True,
) -> dict[str, Any]:
    """As `restore`, but returns the snapshot's `meta`; may leave the optimizer as it is."""
    with train_step.parameters.whole(gathered=False):
        received = _receive(snapshot, train_step, model, transport, root)
        transport.agree()
        load_held(model, train_step.places.own, received.model)
    for name, buffer in train_step.state.unsaved.items():
        buffer.copy_(received.buffers[name])
    if with_optimizer:
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

    A sharded optimizer keeps its state, of which no rank has all.

    Returns:
        The root's `meta`, and its progress.
    """
    snapshot, with_optimizer = None, not train_step.sharded
    if transport.rank == root:
        state = OptimizerState({}, {}, {}, {})
        if with_optimizer:
            state = train_step.flat_optimizer.state()
        snapshot = capture(train_step, model, progress, meta, state)()
    return receive(snapshot, train_step, model, transport, root, with_optimizer)


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
            state.flats[key] = _receive_flats(saved, f"{key}/", train_step, transport, root)
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
    own = held(train_step, model)
    everyone = dict(own)
    shards: Mapping[str, Shard] = {}
    if _is_for_all(train_step, transport):
        shards, everyone = shards_of(model), every_tensor(model)
    buffers = train_step.state.unsaved
    sources = snapshot.model | snapshot.buffers if snapshot else {}
    received = {}
    for name, here in (everyone | buffers).items():
        tensor = torch.empty_like(here, memory_format=torch.contiguous_format)
        there = found(sources, name, shards)
        tensor.copy_(here if there is None else there)
        _broadcast(transport, tensor, root)
        if name in own or name in buffers:
            received[name] = tensor
    return {n: received[n] for n in own}, {n: received[n] for n in buffers}


def _is_for_all(train_step: TrainStep, transport: Transport) -> bool:
    """Whether ranks that receive something hold other shards than the one that sends."""
    return train_step.places.is_split and transport is train_step.places.world


def _receive_flats(
    saved: Mapping[str, Tensor],
    prefix: str,
    train_step: TrainStep,
    transport: Transport,
    root: int,
) -> list[Tensor]:
    """A key of an element-wise optimizer's state, laid out as the parameters that are held here."""
    flat = train_step.flat
    flats = [torch.zeros_like(f) for f in flat.flats]
    own = flat.named(flats)
    if not _is_for_all(train_step, transport):
        for name, view in own.items() if saved else ():
            there = found(saved, name, flat.shards, prefix)
            assert there is not None, "a snapshot that fits has the state of all parameters"
            view.copy_(there)
        for whole in flats:
            _broadcast(transport, whole, root)
        return flats
    for name, tensor in flat.everyone.items():
        sent = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        there = found(saved, name, flat.shards, prefix)
        if there is not None:
            sent.copy_(there)
        _broadcast(transport, sent, root)
        if name in own:
            own[name].copy_(sent)
    return flats


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
