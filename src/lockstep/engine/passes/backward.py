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
from lockstep.engine.passes.compute import numbers_on, stacked
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
        numbers: scalars and counters; on a device float64 [numbers].
        num_scalars: number of scalars.
        weight: weight of the changes of buffers; None for that of the loss.
        is_scaled: whether the loss has the loss scale already.
    """

    loss: Tensor | None
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    deltas: list[Tensor]
    numbers: list[float] | Tensor
    num_scalars: int
    weight: float | Tensor | None = None
    is_scaled: bool = False

    def take(
        self, loss: Tensor | None, scalars: list[float] | Tensor, weight: float | Tensor
    ) -> None:
        """Take what was computed after the forward pass, over the whole batch.

        Args:
            loss: scalar whose backward pass is that of the microbatch, with the loss scale; None if
                it has none.
            scalars: what the leaf has for scalars; a list is one of zeros on a device.
            weight: weight of its changes of buffers.
        """
        self.loss, self.weight, self.is_scaled = loss, weight, True
        counters = self.numbers[self.num_scalars :]
        if isinstance(counters, Tensor):
            # Values of the host are zeros, for which nobody waits.
            own = scalars if isinstance(scalars, Tensor) else counters.new_zeros(len(scalars))
            self.numbers = torch.cat([own, counters])
        else:
            self.numbers = [*scalars, *counters]


class Leaf(NamedTuple):
    """What a microbatch adds to the sums of a step."""

    tensors: list[Tensor | None]
    """Gradients, None where there is none, and changes of buffers."""
    numbers: list[float] | Tensor
    """Scalars and then counters; on a device float64 [num_scalars + num_counters]."""

    def is_same(self, other: Leaf) -> bool:
        """Whether both are equal to the bit."""
        numbers = torch.as_tensor(self.numbers), torch.as_tensor(other.numbers)
        return same_bits(*numbers) and all(
            one is two if one is None or two is None else same_bits(one, two)
            for one, two in zip(self.tensors, other.tensors, strict=True)
        )


def _weigh(deltas: list[Tensor], weight: float | Tensor) -> None:
    """Weight changes of buffers like the loss: divided by the sum of weights, they are a mean."""
    if isinstance(weight, Tensor):
        for delta in deltas:
            delta.mul_(weight.to(delta.dtype))
    elif deltas:
        torch._foreach_mul_(deltas, weight)


class Backward:
    """Gradients of microbatches, as leaves for the ordered reduction."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        state: ForwardState,
        storage: BlockStorage | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._storage, self._device = storage, device or torch.device("cpu")
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
        numbers = numbers_on(self._device, [*scalars, *counters])
        inputs: list[Tensor] = []
        if self._axis is not None and self._row is not None:
            inputs, self._row.inputs = self._row.inputs, []
            if not self._axis.is_last:
                self._axis.send_outputs(outputs)
        total = loss.sum if loss is not None else None
        return Forwarded(total, inputs, outputs, deltas, numbers, len(scalars))

    def leaf(
        self,
        microbatch: int,
        passed: Forwarded,
        loss_scale: float,
        inputs: Sequence[Tensor] | None = None,
    ) -> Leaf | None:
        """The leaf of a microbatch; None if other stages of this rank are still to come.

        Args:
            microbatch: number of the microbatch.
            passed: what its forward pass has left.
            loss_scale: factor of the loss in the backward pass, 1 for none.
            inputs: parameters that get gradients, also such as other ranks hold; all by default.
        """
        axis = self._axis
        weight = passed.numbers[1] if passed.weight is None else passed.weight
        targets = self._targets(inputs, passed)
        if self._storage is not None:
            self._storage.begin_backward()
        if passed.loss is not None:
            is_scaled = loss_scale == 1.0 or passed.is_scaled
            backward(passed.loss if is_scaled else passed.loss * loss_scale, targets)
        elif axis is not None:
            weight = self._backward_from_next(passed.outputs, targets)
        if axis is not None and not axis.is_first:
            self._send_back(passed.inputs, weight)
        if self._storage is not None:
            self._storage.end_backward()
        _weigh(passed.deltas, weight)
        stage = 0 if axis is None else axis.stage
        part = StagePart(stage, passed.deltas, passed.numbers, passed.num_scalars)
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
        return Leaf([*gradients, *part.deltas], part.numbers)

    def on_device(self, total: Tensor, scalars: list[Number], loss_scale: float) -> Leaf:
        """As `forwarded` and `leaf`, of a model in one stage.

        Args:
            total: sum of the loss.
            scalars: sum and weight of the loss, then those of the metrics.
            loss_scale: factor of the loss in the backward pass, 1 for none.
        """
        deltas, counters = self._state.collect()
        numbers = stacked(total.device, [*scalars, *counters])
        backward(total if loss_scale == 1.0 else total * loss_scale)
        _weigh(deltas, numbers[1])
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
    ) -> float | Tensor:
        """The backward pass of a stage that is not the last; returns the weight of the loss."""
        assert self._axis is not None
        *gradients, weight = self._axis.receive_gradients()
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        if pairs:
            backward_from([o for o, _ in pairs], [g for _, g in pairs], targets)
        assert weight is not None
        return float(weight) if weight.is_cpu else weight

    def _send_back(self, inputs: Sequence[Tensor], weight: float | Tensor) -> None:
        """Send the gradients of what the stage before has sent, and the weight of the loss."""
        assert self._axis is not None
        gradients = [tensor.grad for tensor in inputs]
        there = torch.as_tensor(weight, dtype=torch.float64)
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
