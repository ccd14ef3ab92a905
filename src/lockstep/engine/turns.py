"""Whose turn it is: the stages of a rank one after another, and others that need its slices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import nn

from lockstep.comm.transport import Transport
from lockstep.nn.pipeline import Pipeline

T = TypeVar("T")


class Turns:
    """Has a rank compute its stages in turn, and give others what they need of it meanwhile."""

    def __init__(self, model: nn.Module, num_depths: int) -> None:
        """Compute the whole model at once, until its `axis` says otherwise.

        Args:
            model: model of the run; one that is no pipeline has a single stage.
            num_depths: number of ranks that a microbatch goes through (`mesh.pp`).
        """
        self._model = model
        self._num_depths = num_depths

    def of(self, batches: Iterable[T], storage: Transport) -> Iterator[T]:
        """The batches, each once for each stage of this rank, which computes that one then.

        While only other ranks have some left, they get what they need of this one. With parameters
        in slices a collective of the column, between any two batches too.

        Args:
            batches: batches of an evaluation.
            storage: transport between the ranks of this one's column.
        """
        if not isinstance(self._model, Pipeline) or self._model.storage is None:
            yield from self._through_stages(batches)
            return
        left = iter(batches)
        counts = [1] * storage.size
        while True:
            item = next(left, None)
            own = torch.tensor([item is not None])
            if not storage.gather_host(own, counts).any():
                return
            if item is not None:
                yield item
                self.finish()
            else:
                self.skip_forward()

    def _through_stages(self, batches: Iterable[T]) -> Iterator[T]:
        stages = range(1)
        if isinstance(self._model, Pipeline) and self._model.axis is not None:
            stages = self._model.axis.own_stages
        left = iter(batches)
        while group := list(islice(left, self._num_depths if len(stages) > 1 else 1)):
            for stage in stages:
                _, is_last = self.enter(stage)
                for item in group:
                    # An evaluation may change its batch, and each stage has it from the beginning.
                    yield item if is_last else copy.deepcopy(item)
            self.finish()

    def skip_forward(self) -> None:
        """Give others what they need of this rank in a forward pass of an evaluation."""
        if isinstance(self._model, Pipeline) and self._model.storage is not None:
            with torch.no_grad():
                self._model.storage.skip_forward()

    def enter(self, stage: int) -> tuple[bool, bool]:
        """Compute a stage of this rank; returns whether it is the first, and the last of its."""
        axis = self._model.axis if isinstance(self._model, Pipeline) else None
        if axis is None:
            return True, True
        axis.enter(stage)
        return stage == axis.own_stages[0], stage == axis.own_stages[-1]

    def finish(self) -> None:
        """Return when all that this rank has sent to other stages has been."""
        if isinstance(self._model, Pipeline) and self._model.axis is not None:
            self._model.axis.finish()
