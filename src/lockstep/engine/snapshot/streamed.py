"""A training state that no rank has all of, one tensor after the other.

With gradients or parameters in slices a rank may lack the memory for whole ones. So a checkpoint is
written while its tensors come together, those of a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lockstep.engine.checkpoint.tensor_files import Kind, Tensors
from lockstep.engine.digests import combined_digest, tensor_digest
from lockstep.engine.step.train_step import TrainStep
from lockstep.nn.cutting import joined_by_name
from lockstep.nn.pipeline import Pipeline
from lockstep.parallel.exchange import gather_slices


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
        gather_slices(train_step.places.storage, whole, slices)
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
