"""Between a training state in use and a snapshot of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.engine.carry.carries import Held, named_tensors
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.whole_tensors import WholeTensors
from lockstep.engine.optimizer.optimizer_state import DTYPES, TENSOR, OptimizerState, dtype_name
from lockstep.engine.progress import Progress
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.tables.files import check_described, load_whole
from lockstep.engine.tables.lookups import tables_of
from lockstep.errors import CheckpointError
from lockstep.nn.cutting import (
    Shard,
    every_tensor,
    found,
    held_tensors,
    joined_by_name,
    load_held,
    shards_of,
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
    check_described(tables_of(model), snapshot.meta.get("tables", {}), where)


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
    if train_step.tables is not None:
        tables = {dealt.name: dealt.table for dealt in train_step.tables.each}
        check_described(tables, snapshot.meta.get("tables"), where, ("optimizer", "schedule"))
    wholes = train_step.flat.wholes
    saved = {(n.partition("/")[0], n.partition("/")[2]): t for n, t in snapshot.optimizer.items()}
    if train_step.flat_optimizer.elementwise:
        wanted = {(key, name) for key, _ in saved for name in wholes}
    else:
        scalars = snapshot.meta["optimizer_scalars"]
        wanted = {(k, n) for n, kept in scalars.items() for k, v in kept.items() if v == TENSOR}
    for key, name in [*saved, *wanted]:
        tensor = saved.get((key, name))
        if tensor is None or name not in wholes:
            raise CheckpointError(f"{where}: is damaged: optimizer state {key}/{name} does not fit")
        if train_step.flat_optimizer.elementwise and (tensor.shape, tensor.dtype) != wholes[name]:
            shape, dtype = wholes[name]
            raise CheckpointError(
                f"{where}: is damaged: optimizer state {key}/{name} is {tensor.dtype} "
                f"{tuple(tensor.shape)}, must be {dtype} {tuple(shape)}"
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
