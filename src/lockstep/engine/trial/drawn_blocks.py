"""Trials of models that no process has whole: parameters are drawn block by block.

Each process computes the whole model, as in any trial, but has the parameters of a block only while
it computes that block. What it draws, it forgets, and draws again for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.host import give_back_large
from lockstep.data.loader import BatchSource
from lockstep.engine.carry import Carries
from lockstep.engine.digests import checksum
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.passes.buffers import KeptBuffers, changed_in_pass
from lockstep.engine.passes.compute import Compute
from lockstep.engine.trial.outcome import OneBlock
from lockstep.errors import TaskError
from lockstep.nn.cutting import units_of
from lockstep.nn.deferred import RefusedReads
from lockstep.nn.module_row import ModuleRow
from lockstep.nn.row import Row, row_of, set_row
from lockstep.nn.tape import storage_of


class DrawnBlocks(OneBlock):
    """Draws the parameters of a block each time that it is computed, and frees them after it.

    For the passes of a trial, where each process computes the whole model, and none has it.

    Attributes:
        earlier: memory in which parameters were before, of which something may have kept views.
    """

    def __init__(self, row: Row, flat: FlatTensors, earlier: Sequence[Tensor]) -> None:
        """Prepare, with parameters that have no values yet; see `OneBlock`."""
        super().__init__(row, flat)
        self.earlier = earlier
        self._absent = {storage_of(memory): "a parameter" for memory in earlier}
        self._drawn: dict[int, int] = {}
        self._here: Set[int] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Refuse what reads parameters of other blocks than that which is computed.

        Raises:
            TaskError: naming the parameter.
        """
        with RefusedReads(self._absent, _read_outside):
            yield

    @contextmanager
    def only(self, here: Set[int]) -> Iterator[None]:
        """Within it, have NaN in place of parameters that a stage has not.

        Args:
            here: ids of those that it has.
        """
        self._here = here
        try:
            yield
        finally:
            self._here = None
            for segment in self._drawn:
                self._draw(segment)

    def _draw(self, segment: int) -> None:
        self._flat.draw(segment)
        for tensor in self._flat.tensors_of(segment):
            if self._here is not None and id(tensor) not in self._here:
                tensor.data.fill_(torch.nan)
        self._drawn[segment] = checksum(self._flat.flats[segment])

    def _bring(self, segment: int) -> None:
        for memory in self._memories(segment):
            self._absent.pop(memory, None)
        self._draw(segment)

    def _take(self, segment: int) -> None:
        names = [entry.name for entry in self._flat.entries_of(segment)]
        drawn = self._drawn.pop(segment, None)
        if drawn is not None and checksum(self._flat.flats[segment]) != drawn:
            raise TaskError(changed_in_pass(f"a parameter among {', '.join(names)}"))
        for memory in self._memories(segment):
            self._absent.pop(memory, None)
        self._flat.close(segment)
        # The segment's own, as views have it that were kept, comes last.
        self._absent |= dict(zip(self._memories(segment), [*names, *names[:1]], strict=False))

    def _memories(self, segment: int) -> list[int]:
        tensors = [*self._flat.tensors_of(segment), self._flat.flats[segment]]
        return [storage_of(tensor) for tensor in tensors]


def _read_outside(name: str) -> str:
    return (
        f"{name} is read while its block is not computed, and only then it is in memory "
        "(init=by_name with sharding=parameters or mesh.pp): by a loss or metric itself, by "
        "another block, or through a view that something keeps. Compute with what the model "
        "gives, or set init=in_order"
    )


def drawn_blocks(
    model: nn.Module, flat: FlatTensors, compute: Compute, loader: BatchSource
) -> tuple[FlatTensors, DrawnBlocks]:
    """Have a model's blocks drawn when they are computed; and the parameters, in that order.

    Raises:
        TaskError: there is no order.
    """
    row = row_of(model)
    assert row is not None, "others are drawn at once"
    give_back_large()
    earlier: list[Tensor] = []
    if isinstance(row, ModuleRow):
        earlier += flat.flats
        trace = partial(_trace, row, flat, compute, loader)
        trace()
        settle(model, trace)
        flat = flat.moved(units_of(model))
    drawn = DrawnBlocks(row, flat, earlier)
    drawn.begin()
    return flat, drawn


def settle(model: nn.Module, repeat: Callable[[], None]) -> bool:
    """Take the order of a model's units from its passes; returns whether their number may change.

    Args:
        model: model whose passes were followed.
        repeat: computes them once more.

    Raises:
        TaskError: there is no such order.
    """
    row = row_of(model)
    if isinstance(row, ModuleRow) and row.leave_out_irregular():
        if not row.units:
            set_row(model, None)
            raise TaskError(
                f"sharding=parameters: the {type(model).__name__} has no ModuleList or Sequential "
                "whose modules are each called once in a forward pass; name units that are, in "
                "build_model (lockstep.nn.units), or set sharding=gradients"
            )
        repeat()
    return row is not None and row.settle()


def _trace(row: ModuleRow, flat: FlatTensors, compute: Compute, loader: BatchSource) -> None:
    """Compute forward passes, for the order of a row's units, with parameters drawn when called.

    Args:
        row: row that follows its calls, and has no order yet.
        flat: parameters that have no values yet, with segments for each block.
        compute: loss of the task.
        loader: loader of the training samples.
    """
    homes = {id(t): entry.segment for t, entry in zip(flat.tensors, flat.entries, strict=True)}
    units = row.watched()
    needed = [sorted({homes[id(p)] for p in u.parameters() if id(p) in homes}) for u in units]
    outside = {*homes.values()}.difference(*needed)

    def draw(segments: Iterable[int]) -> None:
        for segment in segments:
            flat.draw(segment)

    def close(segments: Iterable[int]) -> None:
        for segment in segments:
            flat.close(segment)

    handles: list[RemovableHandle] = []
    for unit, own in zip(units, needed, strict=True):
        handles.append(unit.register_forward_pre_hook(lambda *_, own=own: draw(own)))
        handles.append(unit.register_forward_hook(lambda *_, own=own: close(own)))
    buffers = KeptBuffers(row.module)
    try:
        draw(outside)
        for step in compute.phases.first_steps:
            compute.forward(step, 0, loader.microbatch(step, 0), Carries())
            compute.lookups.fetch(None)
    finally:
        close(range(len(flat.segments)))
        buffers.restore()
        for handle in handles:
            handle.remove()
