"""The backward pass of one microbatch, whose gradient becomes a leaf of the ordered sum.

Before `Tensor.backward` reaches the autograd engine, torch checks for its compiler, for logging and
for tensor subclasses. For a small model that takes a tenth of the pass, so it is skipped where
none of them is in use.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.overrides import has_torch_function

from lockstep.engine.passes.block_storage import BlockStorage
from lockstep.engine.passes.buffers import ForwardState, same_bits
from lockstep.engine.passes.compute import copied
from lockstep.engine.passes.stages import PartialLeaves, StagePart
from lockstep.engine.task import Loss, Number
from lockstep.nn.row import row_of
from lockstep.parallel.axes import DepthAxis

_COMPILER = "torch._dynamo"
_LOG = logging.getLogger("torch.autograd.graph")
"""Where torch logs each node of a graph as it is computed, at level DEBUG."""


def _if_own(function: Callable[..., None], defined_in: str) -> Callable[..., None] | None:
    """A function, if a file of torch defines it; None if others have replaced that one."""
    # A wrapper has the name and module of what it wraps, but not its code.
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename == defined_in else None


_TENSORS_OWN = _if_own(Tensor.backward, torch._tensor.__file__)
_TORCHS_OWN = _if_own(torch.autograd.backward, torch.autograd.__file__)
"""None where others had replaced it before this module was imported: then they are called."""


def backward(loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
    """Add the gradients of a loss to its leaves, as `loss.backward(inputs=inputs)` does.

    Args:
        loss: scalar that has a gradient.
        inputs: leaves that get a gradient; None for all that there are.
    """
    if _is_watched((loss,), inputs):
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]
    else:  # with a new gradient for each pass, since hooks may change it in place
        gradient = torch.ones_like(loss, memory_format=torch.preserve_format)
        _run_backward((loss,), (gradient,), inputs)


def backward_from(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None
) -> None:
    """Add the gradients of leaves, from those of outputs, as `torch.autograd.backward` does.

    That one imports what the compiler has for shapes.
    """
    if _is_watched(outputs, inputs):
        torch.autograd.backward(outputs, gradients, inputs=inputs)
    else:
        _run_backward(outputs, gradients, inputs)


def _run_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None
) -> None:
    Variable._execution_engine.run_backward(
        tuple(outputs),
        tuple(gradients),
        False,  # the graph is not kept
        False,  # and none is made of this pass
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _is_watched(outputs: Sequence[Tensor], inputs: Sequence[Tensor] | None) -> bool:
    """Whether there is more to do than to call the engine of autograd."""
    return bool(
        # Else other threads compute, and are to see this one's context.
        not all(output.is_cpu and output.is_floating_point() for output in outputs)
        or (inputs is not None and (not inputs or has_torch_function(tuple(inputs))))
        or has_torch_function(tuple(outputs))
        or _COMPILER in sys.modules
        or Tensor.backward is not _TENSORS_OWN
        or torch.autograd.backward is not _TORCHS_OWN
        or _LOG.isEnabledFor(logging.DEBUG)
        or torch._C._are_functorch_transforms_active()
    )


@dataclass
class Forwarded:
    """What a forward pass leaves for its backward pass.

    Attributes:
        loss: loss; None on a stage that is not the last of a pipeline.
        inputs: tensors that the stage before has sent, if there is one.
        outputs: tensors that the next stage goes on with, if there is one.
        deltas: changes of buffers.
        fetch: gives scalars and counters.
        num_scalars: number of scalars.
        weight: weight of the changes of buffers; None for that of the loss.
        is_scaled: whether the loss has the loss scale already.
    """

    loss: Tensor | None
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    deltas: list[Tensor]
    fetch: Callable[[], list[float]]
    num_scalars: int
    weight: float | None = None
    is_scaled: bool = False

    def take(self, loss: Tensor | None, scalars: list[float], weight: float) -> None:
        """Take what was computed after the forward pass, over the whole batch.

        Args:
            loss: scalar whose backward pass is that of the microbatch, with the loss scale; None if
                it has none.
            scalars: what the leaf has for scalars.
            weight: weight of its changes of buffers.
        """
        fetch = self.fetch
        self.loss, self.weight, self.is_scaled = loss, weight, True
        self.fetch = lambda: [*scalars, *fetch()[self.num_scalars :]]


class Leaf(NamedTuple):
    """What a microbatch adds to the sums of a step, on its device."""

    tensors: list[Tensor | None]
    """Gradients, None where there is none, and changes of buffers."""
    numbers: Tensor
    """Scalars and then counters: float64 [num_scalars + num_counters]."""

    def is_same(self, other: Leaf) -> bool:
        """Whether both are equal to the bit."""
        return same_bits(self.numbers, other.numbers) and all(
            one is two if one is None or two is None else same_bits(one, two)
            for one, two in zip(self.tensors, other.tensors, strict=True)
        )


class Backward:
    """Gradients of microbatches, as leaves for the ordered reduction."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        state: ForwardState,
        storage: BlockStorage | None = None,
    ) -> None:
        self._storage = storage
        self._row = row_of(model)
        self._parameters = parameters
        self._state = state
        self._partial: PartialLeaves | None = None

    @property
    def _axis(self) -> DepthAxis | None:
        axis = self._row.axis if self._row is not None else None
        return axis if axis is not None and len(axis.stages) > 1 else None

    def begin(self, is_backward_late: bool = False) -> None:
        """Prepare for a forward pass.

        Args:
            is_backward_late: whether others come before its backward pass.
        """
        if is_backward_late or self._axis is not None:
            self._state.fetch()

    def forwarded(
        self, loss: Loss | None, outputs: tuple[Tensor, ...], scalars: list[Number]
    ) -> Forwarded:
        """Take what a forward pass has computed; the next stage gets `outputs`.

        Args:
            loss: loss that `Compute.forward` returned.
            outputs: what the last block of this stage returned, instead of a loss.
            scalars: sum and weight of the loss, then those of the metrics.
        """
        # Before the backward pass, since recomputed activations run forward passes again.
        deltas, counters = self._state.collect()
        fetch = copied([*scalars, *counters])
        inputs: list[Tensor] = []
        if self._axis is not None and self._row is not None:
            inputs, self._row.inputs = self._row.inputs, []
            if not self._axis.is_last:
                self._axis.send_outputs(outputs)
        total = loss.sum if loss is not None else None
        return Forwarded(total, inputs, outputs, deltas, fetch, len(scalars))

    def leaf(
        self,
        microbatch: int,
        passed: Forwarded,
        loss_scale: float,
        inputs: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor | None], list[float], list[float]] | None:
        """Gradients and changes of buffers of a microbatch, its scalars, and its counters.

        None if other stages of this rank are still to come.

        Args:
            microbatch: number of the microbatch.
            passed: what its forward pass has left.
            loss_scale: factor of the loss in the backward pass, 1 for none.
            inputs: parameters that get gradients, also such as other ranks hold; all by default.
        """
        weight = passed.weight
        axis = self._axis
        targets = self._targets(inputs, passed)
        if self._storage is not None:
            self._storage.begin_backward()
        if passed.loss is not None:
            is_scaled = loss_scale == 1.0 or passed.is_scaled
            backward(passed.loss if is_scaled else passed.loss * loss_scale, targets)
        elif axis is not None:
            weight = self._backward_from_next(passed.outputs, targets)
        if axis is not None and not axis.is_first:
            self._send_back(passed.inputs, passed.fetch()[1] if weight is None else weight)
        if self._storage is not None:
            self._storage.end_backward()
        numbers, count = passed.fetch(), passed.num_scalars
        if passed.deltas:
            # Weighted like the loss: divided by the sum of weights, they are a weighted mean.
            torch._foreach_mul_(passed.deltas, numbers[1] if weight is None else weight)
        stage = 0 if axis is None else axis.stage
        part = StagePart(stage, passed.deltas, numbers[:count], numbers[count:])
        if axis is not None and len(axis.own_stages) > 1:
            if stage > axis.own_stages[0]:
                self._partial_leaves().keep(microbatch, part)
                self._clear()
                return None
            part = self._partial_leaves().joined(microbatch, part)
        if self._row is not None:
            assert self._row.axis is not None, "there is one in a run"
            self._row.ties.collect(self._row.axis)
        gradients = [p.grad for p in self._parameters]
        self._clear()
        return [*gradients, *part.deltas], part.scalars, part.counters

    def on_device(self, total: Tensor, scalars: list[Number], loss_scale: float) -> Leaf:
        """As `forwarded` and `leaf`, of a model in one stage; waits for nothing.

        Args:
            total: sum of the loss.
            scalars: sum and weight of the loss, then those of the metrics.
            loss_scale: factor of the loss in the backward pass, 1 for none.
        """
        deltas, counters = self._state.collect()
        device = total.device
        values = [
            v.detach().double()
            if isinstance(v, Tensor) and v.device == device
            else torch.full((), float(v), dtype=torch.float64, device=device)
            for v in (*scalars, *counters)
        ]
        numbers = torch.stack(values)
        backward(total if loss_scale == 1.0 else total * loss_scale)
        for delta in deltas:
            delta.mul_(numbers[1].to(delta.dtype))
        gradients = [p.grad for p in self._parameters]
        self._clear()
        return Leaf([*gradients, *deltas], numbers)

    def _partial_leaves(self) -> PartialLeaves:
        if self._partial is None:
            assert self._row is not None, "others have one stage"
            buffers = [entry.name for entry in self._state.flat.entries]
            self._partial = PartialLeaves(self._row, self._parameters, buffers)
        return self._partial

    def _targets(
        self, parameters: Sequence[Tensor] | None, passed: Forwarded
    ) -> list[Tensor] | None:
        """What gets gradients where some parameters do; None for everything.

        These have copies in later blocks, and the stage before waits for the gradients of what it
        has sent.
        """
        if parameters is None:
            return None
        ids = {id(p) for p in parameters}
        ties = () if self._row is None else self._row.ties
        copies = [tie.copy for tie in ties if id(tie.parameter) in ids]
        return [*parameters, *copies, *(x for x in passed.inputs if x.requires_grad)]

    def _backward_from_next(
        self, outputs: tuple[Tensor, ...], targets: Sequence[Tensor] | None
    ) -> float:
        """The backward pass of a stage that is not the last; returns the weight of the loss."""
        assert self._axis is not None
        *gradients, weight = self._axis.receive_gradients()
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        if pairs:
            backward_from([o for o, _ in pairs], [g for _, g in pairs], targets)
        assert weight is not None
        return float(weight)

    def _send_back(self, inputs: Sequence[Tensor], weight: float) -> None:
        """Send the gradients of what the stage before has sent, and the weight of the loss."""
        assert self._axis is not None
        gradients = [tensor.grad for tensor in inputs]
        there = torch.tensor(weight, dtype=torch.float64)
        self._axis.send_gradients([*gradients, there])

    def restart(self) -> None:
        """Forget what passes have left behind, also ones that an exception has ended."""
        self._clear()
        if self._partial is not None:
            self._partial.forget()

    def _clear(self) -> None:
        self.clear_gradients()
        self._state.restore()

    def clear_gradients(self) -> None:
        """Forget gradients: one that stays, of an evaluation too, would be added to."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._row is not None:
            self._row.ties.forget()
