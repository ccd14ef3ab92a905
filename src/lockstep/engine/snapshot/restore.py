"""Finding a run's snapshot, and restoring its state, that of another rank, or of another run."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.config import WeightsConfig
from lockstep.config.parsing import parse_int, shown
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing, origin
from lockstep.engine.checkpoint.copies import opened_everywhere
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.events import Warned
from lockstep.engine.optimizer.optimizer_state import DTYPES, OptimizerState, dtype_name
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime, everywhere, on_first
from lockstep.engine.snapshot.capture import (
    capture,
    kept_model,
    load_own,
    own_optimizer_state,
    own_tensors,
)
from lockstep.engine.snapshot.compatibility import check_fits
from lockstep.engine.snapshot.resumable import check_meta
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.task_config import data_buffers
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.nn.cutting import Shard, every_tensor, found, load_held, shards_of

_MOST_STEPS = 8
"""Number of steps that a message names."""


def find_snapshot(root: Path, which: str) -> Snapshot:
    """The checkpoint with a name.

    Args:
        root: path of the folder of a run's checkpoints.
        which: name of a checkpoint: `best`, `latest`, or a step's number.

    Raises:
        CheckpointError: there is none, or its progress is inconsistent.
    """
    snapshot = _read(root, which)
    check_meta(snapshot, str(root / listing.folder_name(snapshot.step)))
    return snapshot


def _read(root: Path, which: str) -> Snapshot:
    if which == "latest":
        snapshot, _, skipped = checkpoint.newest_valid(root)
        if snapshot is None:
            raise CheckpointError(
                f"{root}: holds no valid checkpoint {'; '.join(skipped)}".rstrip()
            )
        return snapshot
    if which == "best":
        folder = listing.read_hint(root, "best")
        if folder is None:
            raise CheckpointError(f"{root}: holds no best checkpoint; there was no evaluation yet")
        return checkpoint.read(folder)
    try:
        step = parse_int(which)
    except ValueError:
        raise CheckpointError(
            f"checkpoint {shown(which)[1:-1]}: must be best, latest, or a step's number"
        ) from None
    folder = root / listing.folder_name(step)
    if not folder.exists():
        raise CheckpointError(f"{root}: holds no checkpoint of step {step}; {_there(root)}")
    return checkpoint.read(folder)


def _there(root: Path) -> str:
    """The steps with checkpoints, for a message; the newest ones if there are many."""
    steps = [str(listing.step_of(folder)) for folder in listing.folders(root)]
    if not steps:
        return "there is none of any step"
    more = f", and {len(steps) - _MOST_STEPS} earlier ones" if len(steps) > _MOST_STEPS else ""
    return f"choose one of {', '.join(reversed(steps[:_MOST_STEPS]))}{more}"


def restore(
    snapshot: Snapshot | None,
    train_step: TrainStep,
    transport: Transport,
    root: int = 0,
    with_optimizer: bool = True,
) -> dict[str, Any]:
    """Bring all ranks into the state of a snapshot that rank `root` has (the others pass None).

    If it is interrupted, all ranks are in the state they were in.

    Args:
        snapshot: a snapshot that fits.
        train_step: training step that gets the state.
        transport: the group of ranks.
        root: the rank that has the snapshot.
        with_optimizer: whether the optimizer's state is restored too.

    Returns:
        The snapshot's `meta`.

    Raises:
        GroupBroken: on all ranks, or on none.
    """
    with train_step.parameters.whole(gathered=False):
        tensors, buffers = receive_model(snapshot, train_step, transport, root)
        meta: dict[str, Any] = transport.gather_json(snapshot.meta if snapshot else {})[root]
        saved = snapshot.optimizer if snapshot else {}
        state = _receive_optimizer(saved, meta, train_step, transport, root)
        task = receive_named(snapshot.task if snapshot else {}, train_step, transport, root)
        # Only now that all ranks have received everything: until here none has changed anything.
        transport.agree()
        _load(train_step, tensors, buffers)
    if with_optimizer:
        train_step.flat_optimizer.load_state(state)
    _load_rest(train_step, task, meta)
    return meta


def restore_own(snapshot: Snapshot, train_step: TrainStep, meta: dict[str, Any]) -> None:
    """Bring this rank into the state of a snapshot, of which it reads its part only.

    Args:
        snapshot: a snapshot that fits.
        train_step: training step that gets the state.
        meta: the snapshot's, as rank 0 has it.
    """
    load_own(train_step, snapshot)
    state = own_optimizer_state(train_step, snapshot, meta)
    train_step.flat_optimizer.load_state(state)
    snapshot.drop()
    _load_rest(train_step, snapshot.task, meta)


def _load_rest(train_step: TrainStep, task: dict[str, Tensor], meta: dict[str, Any]) -> None:
    train_step.loss_scale.load_state_dict(meta["loss_scale"])
    if "learning_rates" in meta:  # earlier versions had no rates but those of the schedule
        train_step.rates.load_state_dict(meta["learning_rates"])
    _load_task(train_step, task, meta.get("task", {}))


def copy_state(
    train_step: TrainStep, progress: Progress, meta: dict[str, Any], transport: Transport, root: int
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
            state = train_step.flat_optimizer.state(device="cpu")
        snapshot = capture(train_step, progress, meta, state)()
    return restore(snapshot, train_step, transport, root, with_optimizer)


def start_from(start: WeightsConfig, train_step: TrainStep, transport: Transport) -> None:
    """Load the weights of another run, which rank 0 reads, on all ranks; a collective.

    Optimizer, step, random state, the task's own state and buffers that are set from the data are
    those of a new run.

    Raises:
        LockstepError: they do not exist or do not fit; on all ranks.
        GroupBroken: a rank has died.
    """
    model, own = train_step.model, data_buffers(train_step.task_state.task, train_step.model)
    snapshot: Snapshot | None = None

    def read() -> list[int]:
        nonlocal snapshot
        if start.only and train_step.placement.is_split:
            raise ConfigError(
                "weights_from.only: a model of which each rank has a part (mesh.tp, mesh.pp) "
                "starts from all weights of another run or from none; leave it out, or set both "
                "to 1"
            )
        stamp = listing.stamp_of(Path(start.path))
        snapshot = origin.weights(start, model, own)
        return stamp

    stamp = on_first(transport, read)
    if transport.rank != 0 and stamp == listing.stamp_of(Path(start.path)):
        with suppress(LockstepError, OSError):
            snapshot = origin.weights(start, model, own, is_known=True)
    is_everywhere = all(transport.gather_json(snapshot is not None))
    if snapshot is not None and is_everywhere:
        loaded = snapshot
        everywhere(transport, lambda: load_own(train_step, loaded))
    else:
        with train_step.parameters.whole():
            sent = snapshot if transport.rank == 0 else None
            tensors, _ = receive_model(sent, train_step, transport, 0)
            transport.agree()
            load_held(model, train_step.placement.own, tensors)
    train_step.state.mark()
    train_step.watched.mark()


@contextmanager
def temporary_state(
    root: Path, step: int, last_step: int, train_step: TrainStep, runtime: Runtime
) -> Iterator[int]:
    """Give model and task the state of a checkpoint within it, and their own again after it.

    The optimizer keeps its state, so nothing may be trained within it. The state from before is
    restored bit for bit, also when an exception leaves the block, such as one for the loss of a
    rank: this takes no communication.

    Args:
        root: folder of all checkpoints.
        step: step of the checkpoint.
        last_step: step of the model's own state.
        train_step: training step with the model and the task.
        runtime: surroundings of this process.

    Yields:
        The step of the state within it; it is `last_step`, with a warning, if the checkpoint cannot
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
            found = checkpoint.read(folder, is_mapped=True)
            check_fits(found, train_step.model, str(folder))
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
    put_back = kept_model(train_step)
    opened = opened_everywhere(transport, snapshot)
    if opened is None:
        with train_step.parameters.whole():
            tensors, buffers = receive_model(snapshot, train_step, transport, 0)
    task = receive_named(snapshot.task if snapshot else {}, train_step, transport, 0)
    values = transport.gather_json(snapshot.meta.get("task", {}) if snapshot else {})[0]
    last_task = train_step.task_state.capture()
    tables, folder = train_step.tables, snapshot.folder if snapshot else None
    if opened is not None:
        folder = opened.folder
    rows = tables.temporary(folder, opened is not None) if tables is not None else nullcontext()
    try:
        with rows:
            if opened is not None:
                load_own(train_step, opened)
            else:
                _load(train_step, tensors, buffers)
            everywhere(transport, lambda: _load_task(train_step, task, values))
            yield step
    finally:
        put_back()
        _load_task(train_step, *last_task)


def receive_model(
    snapshot: Snapshot | None, train_step: TrainStep, transport: Transport, root: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model, and its buffers that are not persistent, of rank `root`'s snapshot.

    A buffer that the snapshot lacks has the value that it has on rank `root`.

    Returns:
        Both by name, as new tensors.

    Raises:
        GroupBroken: a rank was lost.
    """
    own = own_tensors(train_step)
    everyone = dict(own)
    shards: Mapping[str, Shard] = {}
    if _has_other_shards(train_step, transport):
        shards, everyone = shards_of(train_step.model), every_tensor(train_step.model)
    buffers = train_step.state.unsaved
    # No copy: a folder's tensors are read one at a time, when they are looked at.
    sources: Mapping[str, Tensor] = {}
    if snapshot:
        sources = ChainMap(snapshot.buffers, cast("dict[str, Tensor]", snapshot.model))
    received = {}
    for name, here in (everyone | buffers).items():
        tensor = torch.empty_like(here, memory_format=torch.contiguous_format)
        there = found(sources, name, shards)
        tensor.copy_(here if there is None else there)
        _broadcast(transport, tensor, root)
        if name in own or name in buffers:
            received[name] = tensor
    return {n: received[n] for n in own}, {n: received[n] for n in buffers}


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


def _has_other_shards(train_step: TrainStep, transport: Transport) -> bool:
    """Whether ranks that receive something own other shards than the sender."""
    return train_step.placement.is_split and transport is train_step.placement.world


def _receive_optimizer(
    saved: dict[str, Tensor],
    meta: dict[str, Any],
    train_step: TrainStep,
    transport: Transport,
    root: int,
) -> OptimizerState:
    """The state of rank `root`'s optimizer, of whose tensors `saved` has those of its snapshot."""
    state = OptimizerState({}, {}, meta["optimizer_scalars"], meta.get("optimizer_shared", {}))
    if train_step.flat_optimizer.elementwise:
        keys = sorted({name.partition("/")[0] for name in saved})
        for key in transport.gather_json(keys)[root]:
            state.flats[key] = _receive_flats(saved, f"{key}/", train_step, transport, root)
    else:
        state.tensors.update(receive_named(saved, train_step, transport, root))
    return state


def _receive_flats(
    saved: Mapping[str, Tensor],
    prefix: str,
    train_step: TrainStep,
    transport: Transport,
    root: int,
) -> list[Tensor]:
    """A key of an element-wise optimizer's state, laid out as the parameters of this rank."""
    flat = train_step.flat
    flats = [torch.zeros_like(f) for f in flat.flats]
    own = flat.named(flats)
    if not _has_other_shards(train_step, transport):
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


def _broadcast(transport: Transport, tensor: Tensor, root: int) -> None:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    transport.broadcast(data, root)
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _load(train_step: TrainStep, tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Copy tensors into the model in place, since its parameters are views of one flat tensor."""
    with train_step.parameters.whole(gathered=False):
        load_held(train_step.model, train_step.placement.own, tensors)
    for name, buffer in train_step.state.unsaved.items():
        buffer.copy_(buffers[name])
    train_step.state.mark()


def _load_task(train_step: TrainStep, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    train_step.task_state.restore(on_cpu, values)
    train_step.watched.mark()
