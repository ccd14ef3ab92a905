"""Any module as a row of blocks: its units, and what it computes before, between and behind them.

The model's own code calls the units. So each stage runs all of that code, but only its own units:
an earlier one returns what the stage before has sent, and what comes before the units is computed
from parameters that the stage does not have, and thrown away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.data.random import Stream, random_key, seed_all
from lockstep.errors import TaskError
from lockstep.nn.row import Row, StageDone, boundary
from lockstep.nn.row_trace import Structure, Trace
from lockstep.parallel.axes import DepthAxis
from lockstep.parallel.layout import Range

Forward = Callable[..., Any]


class ModuleRow(Row):
    """A row whose blocks are the units, and the gaps around them that use parameters.

    Positions are those of `row_trace`. Until a trace is there, all parameters outside of units
    count as used before the first one.

    Attributes:
        units: names of the units.
        has_stages: whether stages can be made of the blocks. Then random numbers depend on the
            unit, and a parameter has one gradient for each block that has it.
        was_found: whether units were found by the engine, which then may leave some of them out.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        has_stages: bool = False,
        was_found: bool = False,
    ) -> None:
        super().__init__()
        self._model, self.units = model, list(units)
        self.has_stages, self.was_found = has_stages, was_found
        self._originals: list[tuple[nn.Module, Forward | None]] = []
        self._trace: Trace | None = None
        self._structures: Mapping[int, Structure] = {}
        self._received: tuple[Tensor, ...] = ()
        self._is_running, self._next = False, 0
        self._arrange(range(len(self.units)), {}, {})

    def _arrange(
        self, order: Sequence[int], outside: Mapping[str, int], uses: Mapping[int, Collection[int]]
    ) -> None:
        """Number the blocks.

        Args:
            order: units in the order of their calls.
            outside: position of each parameter that is in no unit, by name.
            uses: positions in which each parameter is used, by its id.
        """
        named = list(self._model.named_parameters(remove_duplicate=False))
        self._by_name = {unit: number for number, unit in enumerate(self.units)}
        self._order = list(order)
        self._positions = {unit: 2 * place + 1 for place, unit in enumerate(order)}
        self._outside = {n: outside.get(n, 0) for n, _ in named if self._unit_of(n) is None}
        self._holders = {n.rpartition(".")[0]: place for n, place in self._outside.items()}
        taken = {*self._positions.values(), *self._outside.values()}.union(*uses.values())
        self._numbers = {position: number for number, position in enumerate(sorted(taken))}
        blocks = defaultdict(set)
        for name, parameter in named:
            blocks[id(parameter)].add(self.block_of(name))
        homes = {key: min(found) for key, found in blocks.items()}
        # Used where no module of a block has it, as in `F.linear(x, embedding.weight)`.
        self._used = {k: {self._numbers[p] for p in found} for k, found in uses.items()}
        self._shared: defaultdict[int, set[int]] = defaultdict(set)
        for key, home in homes.items():
            others = self._used.get(key, set()) - blocks[key]
            for block in others if self.has_stages else others | blocks[key]:
                if block != home:
                    self._shared[block].add(home)
        if self.axis is not None:
            self.axis = DepthAxis([Range(0, self.num_blocks)])

    def _unit_of(self, name: str) -> int | None:
        while name and name not in self._by_name:
            name = name.rpartition(".")[0]
        return self._by_name.get(name)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._model

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._numbers)

    @property
    def groups(self) -> list[Range]:
        """Each unit with the gap before it; and the gap behind all units, if it is a block."""
        ends = [self._numbers[position] + 1 for position in sorted(self._positions.values())]
        if self.num_blocks > ends[-1]:
            ends.append(self.num_blocks)
        return [Range(first, last) for first, last in zip([0, *ends], ends, strict=False)]

    def watched(self) -> list[nn.Module]:
        """The units."""
        return [self._model.get_submodule(unit) for unit in self.units]

    def block_of(self, name: str) -> int:
        """The number of the block that a parameter, buffer or module belongs to, by its name."""
        unit = self._unit_of(name)
        if unit is not None:
            return self._numbers[self._positions[unit]]
        position = self._outside.get(name)
        if position is None:
            position = self._holders.get(name.rpartition(".")[0], 0)
        # A gap that is no block is computed where the unit behind it is, or the last unit.
        near = (position, position + 1, position - 1)
        return next(self._numbers[p] for p in near if p in self._numbers)

    def state_of(self, block: int) -> dict[str, Tensor]:
        """Tensors of the model's `state_dict`, among them all that belong to a block."""
        position = next(p for p, number in self._numbers.items() if number == block)
        if position % 2 == 0:
            return self._model.state_dict()
        unit = self.units[self._order[position // 2]]
        there = self._model.get_submodule(unit).state_dict(prefix=f"{unit}.")
        beside = any(place == position for place in self._outside.values())
        return self._model.state_dict() if beside else there

    def parameters_of(self, block: int) -> list[nn.Parameter]:
        """Parameters that a block computes with, also such as other blocks have."""
        found = {
            id(parameter): parameter
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if self.block_of(name) == block or block in self._used.get(id(parameter), ())
        }
        return list(found.values())

    def shared_with(self, block: int) -> set[int]:
        """Earlier blocks that have parameters which a block computes with, too."""
        return super().shared_with(block) | self._shared.get(block, set())

    @property
    def late_blocks(self) -> set[int]:
        """Blocks whose gradients are complete only at the end of a backward pass."""
        return super().late_blocks.union(*self._shared.values())

    def install(self) -> None:
        """Follow the calls of the model and of its units from now on, and trace the first ones."""
        self._trace = Trace(self._model, self.units)
        for number, unit in enumerate(self.watched()):
            self._wrap(unit, partial(self._run_unit, number))
        self._wrap(self._model, self._run_model)
        self.axis = DepthAxis([Range(0, self.num_blocks)])

    def _wrap(self, module: nn.Module, run: Forward) -> None:
        self._originals.append((module, module.__dict__.get("forward")))
        module.forward = partial(run, module.forward)

    def uninstall(self) -> None:
        """Leave the model as it was."""
        if self._trace is not None:
            self._trace.close()
        for module, original in self._originals:
            del module.__dict__["forward"]
            if original is not None:
                module.forward = original
        self._originals.clear()
        self.axis = self._trace = None

    def leave_out_irregular(self) -> bool:
        """Leave out found units that are not called once in each pass; returns whether it did."""
        if self._trace is None or not self.was_found:
            return False
        irregular = self._trace.irregular(len(self.units))
        if not irregular:
            return False
        self.uninstall()
        self.units = [unit for number, unit in enumerate(self.units) if number not in irregular]
        self._arrange(range(len(self.units)), {}, {})
        if self.units:
            self.install()
        return True

    def settle(self) -> bool:
        """Take the order of blocks from the passes that were traced; returns whether it did.

        Raises:
            TaskError: it is not the same each time, and the mesh or `sharding` needs one.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return False
        trace.close()
        try:
            order = trace.order(self.units)
            if self.has_stages:
                trace.check_structures(self.units)
        except TaskError:
            if self.is_called_once:
                raise
            return False
        self._structures = trace.structures
        named = self._model.named_parameters(remove_duplicate=False)
        self._arrange(order, {n: trace.place(n, p) for n, p in named}, trace.uses)
        return True

    def _run_model(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass.

        Raises:
            StageDone: this rank does not compute the last block.
        """
        if self.axis is None:
            return forward(*args, **kwargs)
        self._check_calls()
        if self._trace is not None:
            self._trace.begin()
        self._is_running, self._next = True, 0
        try:
            with self._trace or nullcontext():
                self._enter(0)
                outputs = forward(*args, **kwargs)
                self._leave(2 * self._next, outputs)
        finally:
            self._is_running, self._received = False, ()
        if self._trace is None and self._next < len(self._order):
            self._lose_track(f"does not call {self.units[self._order[self._next]]}")
        if self.entered is not None:
            self.entered(self.num_blocks)
        return outputs

    def _run_unit(self, unit: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a unit, or in its place what an earlier stage has made of it."""
        if not self._is_running or self.axis is None:
            # Activations are computed again: with the random numbers of the first time.
            run = forward if self.axis is None else partial(self._seeded, forward)
            return run(*args, **kwargs)
        place = self._next
        position, is_skipped = 2 * place + 1, False
        if self._trace is not None:
            self._trace.passes[-1].append(unit)
        elif self._order[place : place + 1] != [unit]:
            self._lose_track(f"calls {self.units[unit]} out of turn")
            return self._seeded(forward, *args, **kwargs)
        else:
            is_skipped = self._numbers[position] < self.axis.own.first
        self._next += 1
        self._leave(position - 1, (args, kwargs))
        self._enter(position)
        outputs = self._outputs_before(unit) if is_skipped else forward(*args, **kwargs)
        self._leave(position, outputs)
        if self.has_stages and not is_skipped:
            outputs = self._passed_on(unit, outputs)
        self._enter(position + 1)
        return outputs

    def _seeded(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Seed before and behind a unit, as where it is called in its turn."""
        self._seed()
        outputs = forward(*args, **kwargs)
        self._seed()
        return outputs

    def _enter(self, position: int) -> None:
        if self._trace is not None:
            self._trace.position = position
        if position > 0:
            self._seed()
        number = self._numbers.get(position)
        if number is None or not self._is_own(number):
            return
        if self.entered is not None:
            self.entered(number)
        if self.storage is not None:
            self.storage.unshard(number)
            self.storage.prefetch(number + 1)

    def _leave(self, position: int, values: Any) -> None:
        """End what is computed at a position, of which `values` is all that goes on."""
        number = self._numbers.get(position)
        if number is None or not self._is_own(number):
            return
        if self.storage is not None:
            self.storage.reshard(number)
        if self.descend is None or number == self.num_blocks - 1 or not torch.is_grad_enabled():
            return
        for value in pytree.tree_leaves(values):
            # Before the node that made it, which is older than all those of later blocks; but the
            # node of a leaf may run as soon as its gradient is there.
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.register_hook(partial(self._comes_back, number))  # type: ignore[no-untyped-call]

    def _comes_back(self, number: int, gradient: Tensor) -> None:
        if self.descend is not None:
            self.descend(number)

    def _is_own(self, number: int) -> bool:
        assert self.axis is not None
        return number in range(*self.axis.own)

    def _seed(self) -> None:
        """Make random numbers of stages depend on the position, not on what others have drawn.

        Each seed is made of the last one, which `torch.utils.checkpoint` restores with the state.
        """
        if self.has_stages:
            seed_all(random_key(torch.initial_seed(), Stream.BLOCKS))

    def _outputs_before(self, unit: int) -> Any:
        """What the stage before has sent, as a unit returns it."""
        if self._next == 1:
            assert self.axis is not None
            self.inputs = self.axis.receive_inputs()
            self._received = tuple(boundary(x) for x in self.inputs)
        return self._structures[unit].filled(self._received)

    def _passed_on(self, unit: int, outputs: Any) -> Any:
        """What a unit has returned, as it would arrive at another rank."""
        assert self.axis is not None
        structure, tensors = Structure.of(outputs, self.units[unit])
        if self._trace is not None:
            self._trace.structures[unit] = structure
        elif self.is_called_once and self._structures[unit] != structure:
            raise TaskError(
                f"stages: {self.units[unit]} returned something of another structure than for the "
                "first microbatch; let it return the same kinds of values each time, or set "
                "mesh.pp=1"
            )
        number = self._numbers.get(self._positions[unit])
        if self._trace is None and not self.axis.is_last and number == self.axis.own.last - 1:
            raise StageDone(tensors, self.axis)
        return structure.filled(boundary(x) for x in tensors)

    def _lose_track(self, what: str) -> None:
        """Note that a pass goes another way than the first one, where that is possible at all.

        Raises:
            TaskError: it is not.
        """
        if self.is_called_once:
            raise TaskError(
                f"Task.loss or Task.evaluate: the model {what}, and not in the order of the first "
                "microbatch, which a model in stages (mesh.pp) or in slices (sharding=parameters) "
                "must keep to; name other units (lockstep.nn.units), or set mesh.pp=1 and "
                "sharding=optimizer"
            )
        self.num_calls = max(self.num_calls, 2)
