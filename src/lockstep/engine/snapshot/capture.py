"""Taking a snapshot of a training state in use, also where no rank has all of it.

With gradients or parameters in slices a rank may lack the memory for whole ones. So a checkpoint is
written while its tensors come together, those of a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.carry.carries import Held, named_tensors
from lockstep.engine.checkpoint.format import Kind, Snapshot, Tensors
from lockstep.engine.digests import combined_digest, model_digest, tensor_digest, tensors_digest
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.placement import Placement
from lockstep.engine.run.progress import Progress
from lockstep.engine.step.train_step import TrainStep
from lockstep.nn.cutting import every_tensor, held_tensors, joined_by_name, shards_of, units_of
from lockstep.nn.pipeline import Pipeline
from lockstep.nn.ties import Unit
from lockstep.parallel.exchange import gather_slices


@dataclass(frozen=True)
class WholeTensors:
    """Copies in host memory.

    Attributes:
        model: parameters and persistent buffers by name.
        optimizer: tensors of an element-wise optimizer's state by "key/parameter".
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def whole_tensors(
    placement: Placement, model: nn.Module, flat: FlatTensors, state: OptimizerState | None
) -> WholeTensors | None:
    """All tensors on rank 0, None on the others; a collective of all ranks.

    Args:
        placement: where each rank is on the mesh.
        model: model of this rank.
        flat: its trainable parameters in flat memory.
        state: this rank's part of the optimizer's state, if that is wanted too.
    """
    if placement.replica_number != 0:
        return None
    shards, units = shards_of(model), units_of(model)
    here, everywhere = held_tensors(model, placement.own), every_tensor(model)
    tensors = dict(joined_by_name(_gathered(placement, here, everywhere, units), shards))
    optimizer = {}
    flats = state.flats if state else {}
    # A rank that trains no parameter has no state of any.
    for key in sorted({key for keys in placement.replica.gather_json(list(flats)) for key in keys}):
        here = flat.named(flats[key]) if key in flats else {}
        everyone = _gathered(placement, here, flat.everyone, flat.units)
        for name, tensor in joined_by_name(everyone, flat.shards):
            optimizer[f"{key}/{name}"] = tensor
    return WholeTensors(tensors, optimizer) if placement.world.rank == 0 else None


def whole_digest(
    placement: Placement, model: nn.Module, flat: FlatTensors, buffers: Mapping[str, Tensor]
) -> str:
    """`model_digest` of the whole model; a collective of all ranks."""
    if not placement.is_split:
        return model_digest(model, buffers)
    whole = whole_tensors(placement, model, flat, None)
    digest = tensors_digest(whole.model | dict(buffers)) if whole else ""
    return str(placement.world.gather_json(digest)[0])


def _gathered(
    placement: Placement,
    own: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    units: Mapping[str, Unit],
) -> dict[str, Tensor]:
    """Tensors by name, on rank 0 those of all ranks of its replica, in host memory.

    Args:
        placement: where each rank is on the mesh.
        own: tensors that this rank holds.
        likes: all tensors; those that this rank does not hold count with their shapes only.
        units: unit of each tensor that not every rank need hold.
    """
    is_first = placement.world.rank == 0
    gathered = {n: t.detach().to("cpu", copy=True) for n, t in own.items() if n not in units}
    for name, like in likes.items():
        if name not in units:
            continue
        tensor = own.get(name)
        if tensor is None:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        placement.replica.broadcast(flat, placement.holder(units[name]))
        if is_first:
            gathered[name] = flat.view(tensor.dtype).view(tensor.shape).to("cpu", copy=True)
    return gathered


def streamed_digest(train_step: TrainStep, model: nn.Module, buffers: Mapping[str, Tensor]) -> str:
    """`model_digest` of the whole model; a collective."""
    streamed = StreamedState(train_step, model, [])
    named = zip(streamed.model.kinds, streamed.model.content, strict=True)
    digests = {name: tensor_digest(name, tensor) for name, tensor in named}
    streamed.drain()
    return combined_digest(digests | {n: tensor_digest(n, t) for n, t in buffers.items()})


class StreamedState:
    """Parameters, buffers and optimizer state of all ranks of a single column.

    Every rank goes through all tensors in the same order, for they are gathered on the way: by
    reading `model` and then `optimizer`, or by `drain`.

    Attributes:
        model: tensors of the model's `state_dict`.
        optimizer: tensors of an element-wise optimizer's state by "key/parameter".
    """

    def __init__(self, train_step: TrainStep, model: nn.Module, keys: list[str]) -> None:
        """Plan what comes when.

        Args:
            train_step: training step with the parameters and the optimizer.
            model: model that is trained.
            keys: keys of the optimizer's state that are tensors, of all ranks.
        """
        self._train_step, self._model, self._keys = train_step, model, sorted(keys)
        known = {n: Kind(t.dtype, t.shape) for n, t in model.state_dict().items()}
        self._sizes = sorted({kind.dtype.itemsize for kind in known.values()}, reverse=True)
        self._known = known
        self._tensors = self._each()
        of_model = sorted(known, key=lambda name: -known[name].dtype.itemsize)
        self.model = Tensors({name: known[name] for name in of_model}, self._next(len(of_model)))
        of_optimizer = {
            f"{key}/{name}": kind
            for segment in self._segments
            for key in self._keys
            for name, kind in self._wholes(segment).items()
        }
        self.optimizer = Tensors(of_optimizer, self._next(len(of_optimizer)))

    def drain(self) -> None:
        """Take part in what is left of them."""
        for _ in self._tensors:
            pass

    def _next(self, count: int) -> Iterator[Tensor]:
        return (tensor for _, tensor in zip(range(count), self._tensors, strict=False))

    def _each(self) -> Iterator[Tensor]:
        for size in self._sizes:
            yield from self._of_model(size)
        for segment in self._segments:
            for key in self._keys:
                yield from self._of_optimizer(segment, key)

    def _of_model(self, size: int) -> Iterator[Tensor]:
        """Tensors of the model whose elements take `size` bytes, in the order of `state_dict`."""
        wanted = {name for name, kind in self._known.items() if kind.dtype.itemsize == size}
        if not isinstance(self._model, Pipeline):
            yield from (t for name, t in self._model.state_dict().items() if name in wanted)
            return
        yield from (t for n, t in self._model.named_buffers(recurse=False) if n in wanted)
        storage = self._model.storage
        for number, (name, block) in enumerate(self._model.named_children()):
            prefix = f"{name}."
            if not any(name.startswith(prefix) for name in wanted):
                continue
            with torch.no_grad():
                if storage is not None:
                    storage.unshard(number)
                state = block.state_dict(prefix=prefix)
                yield from (t for name, t in state.items() if name in wanted)
                del state
                if storage is not None:
                    storage.reshard(number)

    def _of_optimizer(self, segment: int, key: str) -> Iterator[Tensor]:
        """A key of the optimizer's state, of the parameters in a segment."""
        train_step = self._train_step
        flat, slices = train_step.flat, train_step.workspace.slices[segment]
        dtype, numel = flat.segments[segment]
        whole = torch.zeros(numel, dtype=dtype, device=flat.flats[0].device)
        for (first, last), part in train_step.flat_optimizer.state_of(segment, key):
            whole[first:last] = part
        gather_slices(train_step.placement.storage, whole, slices)
        views = {e.name: self._view(whole, e.range, e.shape) for e in flat.entries_of(segment)}
        yield from (tensor for _, tensor in joined_by_name(views, flat.shards))

    @staticmethod
    def _view(whole: Tensor, part: tuple[int, int], shape: torch.Size) -> Tensor:
        first, last = part
        return whole[first:last].view(shape)

    @property
    def _segments(self) -> list[int]:
        """Those of the largest elements first."""
        segments = self._train_step.flat.segments
        return sorted(range(len(segments)), key=lambda s: -segments[s].dtype.itemsize)

    def _wholes(self, segment: int) -> Mapping[str, Kind]:
        """Names and kinds of the parameters of a segment, in the order of `_of_optimizer`."""
        flat = self._train_step.flat
        dtype = flat.segments[segment].dtype
        likes = {
            e.name: torch.empty(e.shape, dtype=dtype, device="meta")
            for e in flat.entries_of(segment)
        }
        return {n: Kind(dtype, t.shape) for n, t in joined_by_name(likes, flat.shards)}


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
    placement = train_step.placement
    return held_tensors(model, placement.own) if placement.is_split else dict(model.state_dict())


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _named(train_step: TrainStep, state: OptimizerState) -> dict[str, Tensor]:
    """An optimizer's tensors by "key/parameter", on the CPU."""
    optimizer = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    shards = {} if train_step.placement.is_split else train_step.flat.shards
    for key, segments in state.flats.items():
        for name, tensor in joined_by_name(train_step.flat.named(segments), shards):
            optimizer[f"{key}/{name}"] = tensor.cpu()
    return optimizer
