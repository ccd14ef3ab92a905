"""A microbatch with parameters that are there only while their block is computed.

What else reads them (a loss that penalises a weight, a block that returns one, a view that was
kept) would find other numbers, or memory that is gone, once parameters are in slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.engine.digests import checksum
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.nn.pipeline import Pipeline


class Rehearsal:
    """Stands for the storage of a pipeline's blocks: fills what would be freed with NaN.

    Views see that too, which share the memory. Gradients go when their block is left, for there is
    no memory for all. Talks to nobody.

    Attributes:
        gradients: checksums of those that went in this pass, by the parameter's id.
    """

    def __init__(self, model: Pipeline, flat: FlatTensors) -> None:
        """Keep a copy of all parameters.

        Args:
            model: model whose parameters are all in memory.
            flat: its trainable parameters, with segments for each block.
        """
        self._model, self._flat = model, flat
        self._kept = [memory.clone() for memory in flat.flats]
        self._users: Counter[int] = Counter()
        self._next = -1
        self.gradients: dict[int, int] = {}
        homes = {id(t): e.segment for t, e in zip(flat.tensors, flat.entries, strict=True)}
        self._needed = [
            sorted({homes[id(p)] for p in block.parameters() if id(p) in homes}) for block in model
        ]
        uses = Counter(segment for needed in self._needed for segment in needed)
        self._of_one_block = {segment for segment, num in uses.items() if num == 1}

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Within it the model is computed so; after it all parameters are as they were."""
        self._model.storage, self._model.descend = self, self.descend
        self.end_pass()
        try:
            yield
        finally:
            self._model.storage = self._model.descend = None
            for memory, kept in zip(self._flat.flats, self._kept, strict=True):
                memory.copy_(kept)

    def end_pass(self) -> None:
        """Free all."""
        self._users.clear()
        for memory in self._flat.flats:
            memory.fill_(float("nan"))

    def unshard(self, block: int) -> None:
        """See `lockstep.nn.storage.Storage`."""
        for segment in self._needed[block]:
            self._users[segment] += 1
            self._flat.flats[segment].copy_(self._kept[segment])

    def reshard(self, block: int) -> None:
        """See `lockstep.nn.storage.Storage`."""
        last = len(self._model) - 1
        if torch.is_grad_enabled() and block == last:
            self._next = last - 1  # its backward pass comes next
        else:
            self._drop(block)

    def skip_forward(self) -> None:
        """Nothing to do: there are no other ranks."""

    def descend(self, block: int) -> None:
        """Begin the backward pass of a block; that of those behind it is over."""
        while self._next >= block:
            self._take_gradients(self._next + 1)
            self._drop(self._next + 1)
            self.unshard(self._next)
            self._next -= 1

    def _take_gradients(self, block: int) -> None:
        for segment in self._of_one_block.intersection(self._needed[block]):
            for tensor in self._flat.tensors_of(segment):
                gradient = tensor.grad
                # Of others the trial has no checksums to compare with.
                if gradient is not None and gradient.is_cpu and gradient.layout == torch.strided:
                    self.gradients[id(tensor)] = checksum(gradient)
                    tensor.grad = None

    def _drop(self, block: int) -> None:
        for segment in self._needed[block]:
            self._users[segment] -= 1
            if not self._users[segment]:
                self._flat.flats[segment].fill_(float("nan"))
