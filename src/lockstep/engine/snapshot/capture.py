"""Taking a snapshot of a training state in use, also where no rank has all of it.

With gradients or parameters in slices a rank may lack the memory for whole ones. So a checkpoint is
written while its tensors are gathered, those of a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.engine.carry import CarryByNumber, named_tensors
from lockstep.engine.checkpoint.format import Kind, Snapshot, Tensors
from lockstep.engine.digests import combined_digest, model_digest, tensor_digest, tensors_digest
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.placement import Placement
from lockstep.engine.run.progress import Progress
from lockstep.engine.step.train_step import TrainStep
from lockstep.nn.cutting import every_tensor, held_tensors, joined_by_name, shards_of, units_of
from lockstep.nn.holding import Unit
from lockstep.nn.row import Pipeline, row_of
from lockstep.parallel.exchange import gather_slices


class WholeTensors(NamedTuple):
    """Copies in host memory.

    Attributes:
        model: parameters and persistent buffers by name.
        optimizer: tensors of an element-wise optimizer's state by "key/parameter".
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def capture(
    train_step: TrainStep,
    progress: Progress,
    meta: dict[str, Any],
    state: OptimizerState,
    whole: WholeTensors | None = None,
    carries: CarryByNumber | None = None,
) -> Callable[[], Snapshot]:
    """Copy the state in memory; the function that is returned makes a snapshot of the copies.

    Args:
        train_step: training step with the model, the optimizer, the loss scale and the task.
        progress: position and history of the run.
        meta: further values for the manifest, JSON-able.
        state: state of the optimizer, already copied.
        whole: tensors of model and optimizer, if other ranks own some of them. Without it, the
            snapshot of a model in shards has what this rank owns.
        carries: what all microbatches carry; None if they carry nothing.
    """
    task, values = train_step.task_state.capture()
    if whole:
        tensors = whole.model
    else:
        with train_step.flat_optimizer.evaluating():
            tensors = _copied(own_tensors(train_step))
    buffers = _copied(train_step.state.unsaved)
    carry: dict[str, Tensor] = {}
    if carries is not None:
        carry, structures = named_tensors(carries)
        meta = meta | {"carry": structures}
    meta = meta | {
        "progress": progress.state_dict(),
        "loss_scale": train_step.loss_scale.state_dict(),
        "learning_rates": train_step.rates.state_dict(),
        "optimizer_scalars": state.scalars,
        "optimizer_shared": state.shared,
        "task": values,
    }
    step = progress.step  # the progress goes on while the snapshot is written

    def make() -> Snapshot:
        optimizer = whole.optimizer if whole else _optimizer_tensors(train_step, state)
        return Snapshot(step, tensors, optimizer, meta, buffers, task, carry)

    return make


def own_tensors(train_step: TrainStep) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank has; whole ones by their own names."""
    placement, model = train_step.placement, train_step.model
    return held_tensors(model, placement.own) if placement.is_split else dict(model.state_dict())


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _optimizer_tensors(train_step: TrainStep, state: OptimizerState) -> dict[str, Tensor]:
    """An optimizer's tensors by "key/parameter", on the CPU."""
    optimizer = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    shards = {} if train_step.placement.is_split else train_step.flat.shards
    for key, segments in state.flats.items():
        for name, tensor in joined_by_name(train_step.flat.named(segments), shards):
            optimizer[f"{key}/{name}"] = tensor.cpu()
    return optimizer


def whole_digest(train_step: TrainStep) -> str:
    """`model_digest` of the whole model; a collective of all ranks."""
    buffers = train_step.state.unsaved
    if train_step.is_streamed:
        streamed = StreamedState(train_step, [])
        named = zip(streamed.model.kinds, streamed.model.content, strict=True)
        digests = {name: tensor_digest(name, tensor) for name, tensor in named}
        streamed.drain()
        return combined_digest(digests | {n: tensor_digest(n, t) for n, t in buffers.items()})
    with train_step.parameters.whole():
        if not train_step.placement.is_split:
            return model_digest(train_step.model, buffers)
        whole = whole_tensors(train_step, None)
        digest = tensors_digest(whole.model | dict(buffers)) if whole else ""
        return str(train_step.placement.world.gather_json(digest)[0])


def whole_tensors(train_step: TrainStep, state: OptimizerState | None) -> WholeTensors | None:
    """All tensors of a model in shards or stages on rank 0, None on the others; a collective.

    Args:
        train_step: training step with this rank's part of the model.
        state: this rank's part of the optimizer's state, if that is wanted too.
    """
    placement, model, flat = train_step.placement, train_step.model, train_step.flat
    if placement.replica_number != 0:
        return None
    here = held_tensors(model, placement.own)
    everyone = _gathered(placement, here, every_tensor(model), units_of(model))
    tensors = dict(joined_by_name(everyone, shards_of(model)))
    optimizer = {}
    flats = state.flats if state else {}
    # A rank that trains no parameter has no state of any.
    for key in sorted({key for keys in placement.replica.gather_json(list(flats)) for key in keys}):
        here = flat.named(flats[key]) if key in flats else {}
        everyone = _gathered(placement, here, flat.everyone, flat.units)
        for name, tensor in joined_by_name(everyone, flat.shards):
            optimizer[f"{key}/{name}"] = tensor
    return WholeTensors(tensors, optimizer) if placement.world.rank == 0 else None


def _gathered(
    placement: Placement,
    own: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    units: Mapping[str, Unit],
) -> dict[str, Tensor]:
    """Tensors by name, on rank 0 those of all ranks of its replica, in host memory.

    Args:
        placement: place of each rank on the mesh.
        own: tensors that this rank has.
        likes: all tensors; of those that this rank does not have, only the shapes count.
        units: unit of each tensor that not every rank has.
    """
    gathered = _copied({name: tensor for name, tensor in own.items() if name not in units})
    for name, like in likes.items():
        if name not in units:
            continue
        tensor = own.get(name)
        if tensor is None:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        placement.replica.broadcast(flat, placement.owner_column(units[name]))
        if placement.world.rank == 0:
            gathered[name] = flat.view(tensor.dtype).view(tensor.shape).to("cpu", copy=True)
    return gathered


class StreamedState:
    """Parameters, buffers and optimizer state of all ranks of a single column.

    Each tensor is gathered when it is read. So every rank goes through all of them in the same
    order: by reading `model` and then `optimizer`, or by `drain`.

    Attributes:
        model: tensors of the model's `state_dict`.
        optimizer: tensors of an element-wise optimizer's state by "key/parameter".
    """

    def __init__(self, train_step: TrainStep, keys: list[str]) -> None:
        """Plan the order of the tensors.

        Args:
            train_step: training step with the model and the optimizer.
            keys: keys of the optimizer's state that are tensors, of all ranks.
        """
        self._train_step, self._model, self._keys = train_step, train_step.model, sorted(keys)
        self._kinds = {n: Kind(t.dtype, t.shape) for n, t in self._model.state_dict().items()}
        segments = train_step.flat.segments
        # Those of the largest elements first, as in the files.
        self._segments = sorted(range(len(segments)), key=lambda s: -segments[s].dtype.itemsize)
        self._tensors = self._each()
        self._blocks = self._blocks_of_names()
        names = sorted(
            self._kinds, key=lambda name: (-self._kinds[name].dtype.itemsize, self._blocks[name])
        )
        self.model = Tensors({name: self._kinds[name] for name in names}, self._next(len(names)))
        kinds = {
            f"{key}/{name}": kind
            for segment in self._segments
            for key in self._keys
            for name, kind in self._kinds_of(segment).items()
        }
        self.optimizer = Tensors(kinds, self._next(len(kinds)))

    def _blocks_of_names(self) -> dict[str, int]:
        """The block of each tensor of the model, by name; -1 for those of none."""
        row = row_of(self._model)
        if row is None:
            return dict.fromkeys(self._kinds, -1)
        own = dict(self._model.named_buffers(recurse=False)) if isinstance(row, Pipeline) else {}
        return {name: -1 if name in own else row.block_of(name) for name in self._kinds}

    def drain(self) -> None:
        """Take part in gathering the tensors that are left."""
        for _ in self._tensors:
            pass

    def _next(self, count: int) -> Iterator[Tensor]:
        return (tensor for _, tensor in zip(range(count), self._tensors, strict=False))

    def _each(self) -> Iterator[Tensor]:
        for size in sorted({kind.dtype.itemsize for kind in self._kinds.values()}, reverse=True):
            yield from self._of_model(size)
        for segment in self._segments:
            for key in self._keys:
                yield from self._of_optimizer(segment, key)

    def _of_model(self, size: int) -> Iterator[Tensor]:
        """Tensors of the model whose elements take `size` bytes, block by block."""
        by_block: dict[int, list[str]] = {}
        for name, kind in self._kinds.items():
            if kind.dtype.itemsize == size:
                by_block.setdefault(self._blocks[name], []).append(name)
        row = row_of(self._model)
        for block, names in sorted(by_block.items()):
            with torch.no_grad():
                if row is None or block < 0:
                    state = self._model.state_dict()
                    yield from (state[name] for name in names)
                    continue
                if row.storage is not None:
                    row.storage.unshard(block)
                state = row.state_of(block)
                yield from (state[name] for name in names)
                del state  # views would keep the block's memory from being freed
                if row.storage is not None:
                    row.storage.reshard(block)

    def _of_optimizer(self, segment: int, key: str) -> Iterator[Tensor]:
        """A key of the optimizer's state, of the parameters in a segment."""
        train_step = self._train_step
        flat, slices = train_step.flat, train_step.workspace.slices[segment]
        dtype, numel = flat.segments[segment]
        whole = torch.zeros(numel, dtype=dtype, device=flat.flats[0].device)
        for (first, last), part in train_step.flat_optimizer.state_of(segment, key):
            whole[first:last] = part
        gather_slices(train_step.placement.storage, whole, slices)
        views = {
            e.name: whole[e.range.first : e.range.last].view(e.shape)
            for e in flat.entries_of(segment)
        }
        yield from (tensor for _, tensor in joined_by_name(views, flat.shards))

    def _kinds_of(self, segment: int) -> dict[str, Kind]:
        """Names and kinds of the parameters of a segment, in the order of `_of_optimizer`."""
        flat = self._train_step.flat
        dtype = flat.segments[segment].dtype
        likes = {
            e.name: torch.empty(e.shape, dtype=dtype, device="meta")
            for e in flat.entries_of(segment)
        }
        return {n: Kind(dtype, t.shape) for n, t in joined_by_name(likes, flat.shards)}
