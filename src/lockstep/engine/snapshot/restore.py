"""Bringing ranks into the state of a snapshot, of another rank, or of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.config import WeightsConfig
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing, origin
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.events import Warned
from lockstep.engine.optimizer.optimizer_state import DTYPES, OptimizerState, dtype_name
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime, everywhere, on_first
from lockstep.engine.snapshot.capture import capture, held
from lockstep.engine.snapshot.fits import check_fits
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.tables.files import load_whole
from lockstep.engine.tables.run_tables import tables_of
from lockstep.engine.task import data_buffers
from lockstep.errors import CheckpointError, ConfigError
from lockstep.nn.cutting import Shard, every_tensor, found, load_held, shards_of


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
        load_held(model, train_step.placement.own, received.model)
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
    return train_step.placement.is_split and transport is train_step.placement.world


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


def take_over(
    start: WeightsConfig, train_step: TrainStep, model: nn.Module, transport: Transport
) -> None:
    """Bring the weights that a run starts from, which rank 0 reads, to all ranks; a collective.

    Optimizer, step, random state, the task's own state and buffers that are set from the data are
    those of a new run.

    Raises:
        LockstepError: they are not there or do not fit; on all ranks.
        GroupBroken: a rank has died.
    """
    snapshot = Snapshot(0, {}, {})

    def read() -> None:
        if start.only and train_step.placement.is_split:
            raise ConfigError(
                "weights_from.only: a model of which each rank has a part (mesh.tp, mesh.pp) "
                "starts from all weights of another run or from none; leave it out, or set both "
                "to 1"
            )
        own = data_buffers(train_step.task_state.task, model)
        snapshot.model = origin.weights(start, model, own)

    with train_step.parameters.whole():
        on_first(transport, read)
        is_first = transport.rank == 0
        tensors, _ = receive_model(snapshot if is_first else None, train_step, model, transport, 0)
        transport.agree()
        load_held(model, train_step.placement.own, tensors)
    train_step.state.mark()
    train_step.watched.mark()


@contextmanager
def temporary_state(
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
        load_held(model, train_step.placement.own, tensors)
    for name, buffer in train_step.state.unsaved.items():
        buffer.copy_(buffers[name])
    train_step.state.mark()


def _load_task(train_step: TrainStep, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    train_step.task_state.restore(tensors, values)
    train_step.watched.mark()
