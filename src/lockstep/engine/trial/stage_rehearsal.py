"""A rehearsal of stages in one process: each has the parameters of its own blocks only.

A model that is no `Pipeline` runs all of its code on each stage. Code around the blocks that reads
what another stage has (a residual connection past the row, a weight that two stages use by one
name) would find other numbers there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.engine.task import Loss
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.row import Row, StageDone
from lockstep.parallel.depth_axis import DepthAxis
from lockstep.parallel.layout import Range


class _OneProcess(DepthAxis):
    """Stages after one another, which hand over tensors with their graph."""

    outputs: Sequence[Tensor] = ()

    def receive_inputs(self) -> list[Tensor]:
        return list(self.outputs)


class StageRehearsal:
    """Computes a loss as it is computed on as many stages as the row can be cut into."""

    def __init__(self, row: Row) -> None:
        """Prepare for a row whose parameters are all in memory."""
        self._row = row
        named = row.module.named_parameters(remove_duplicate=False)
        self._named = [(row.block_of(name), parameter) for name, parameter in named]

    def loss(self, forward: Callable[[], Loss]) -> Loss:
        """What the last stage computes; its graph goes back through all stages.

        Args:
            forward: computes the loss of one microbatch from the beginning.

        Raises:
            TaskError: no loss comes of it.
        """
        axis = _OneProcess(self._row.groups)
        usual, self._row.axis = self._row.axis, axis
        try:
            for stage, own in enumerate(axis.stages):
                axis.enter(stage)
                with self._only(own):
                    try:
                        return forward()
                    except StageDone as done:
                        axis.outputs = done.outputs
        except LockstepError:
            raise
        except Exception as error:
            raise TaskError(
                f"{differs_on_stages('Task.loss')} ({type(error).__name__}: {error})"
            ) from None
        finally:
            self._row.axis = usual
        raise TaskError(differs_on_stages("Task.loss"))

    @contextmanager
    def _only(self, own: Range) -> Iterator[None]:
        """Have NaN in place of the parameters of other blocks."""
        here = {id(p) for block, p in self._named if block in range(*own)}
        others = {id(p): p for _, p in self._named if id(p) not in here}.values()
        # By `data`, which autograd does not take for a change of what it has saved.
        kept = [parameter.data.clone() for parameter in others]
        try:
            for parameter in others:
                parameter.data.fill_(torch.nan)
            yield
        finally:
            for parameter, content in zip(others, kept, strict=True):
                parameter.data.copy_(content)


def differs_on_stages(what: str) -> str:
    """The error message about a result that differs on stages."""
    return (
        f"{what} differs when blocks are computed by stages (mesh.pp), each with its own "
        "parameters: the model, or the loss, reads something of another stage around the blocks, "
        "such as what came before the first one, a parameter that is used before and behind them "
        "by one name, or what a block keeps for later ones. Write the model as a "
        "lockstep.nn.Pipeline, or set mesh.pp=1"
    )
