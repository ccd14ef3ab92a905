"""Stepping parameters: any torch optimizer, on flat tensors or slices of them where it can be.

An element-wise optimizer computes each element of a parameter from the same elements of its
gradient and state. So it may as well step one flat tensor instead of many parameters, or only the
slice of it that this rank owns, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from lockstep.data.random import global_state, seed_all
from lockstep.engine.audit.hidden_state import differing, hidden_state
from lockstep.engine.audit.reachable import module_globals
from lockstep.engine.flat_tensors import FlatTensors, Slice, storages
from lockstep.engine.optimizer import fast_steps
from lockstep.engine.optimizer.choice import (
    NamedOptimizers,
    has_modes,
    is_elementwise,
    may_draw,
    own_groups,
    parts_of,
    stepping_in,
)
from lockstep.engine.optimizer.fast_steps import FlatState, Keepers, Stepped, pieces
from lockstep.engine.optimizer.optimizer_state import (
    TENSOR,
    OptimizerState,
    SharedState,
    are_tensors,
    describe,
    from_json,
    home_of,
    tensor_names,
    to_json,
)
from lockstep.errors import ConfigError, TaskError
from lockstep.parallel.layout import Range, is_in, within

_TRAINED = "trained"
"""Key of the parameters that are trained, where others are evaluated and kept."""


class FlatOptimizer:
    """Applies an optimizer to flat parameters and gradients.

    Attributes:
        description: class, groups and hyperparameters of the optimizer, by words for people.
        may_draw: whether its steps may draw random numbers; those of torch's own do not.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        flat: FlatTensors,
        slices: Sequence[Sequence[Slice]],
        sharded: bool = False,
    ) -> None:
        """Bind the optimizer to memory.

        Args:
            optimizer: optimizer of the parameters in `flat`; changed to step flat tensors if it
                can.
            flat: trainable parameters in flat memory.
            slices: what to step, for each segment.
            sharded: whether other ranks step other ranges.
        """
        self._optimizer = optimizer
        self._sharded = sharded
        self._drawing = self._moved = ""
        self._num_steps = 0
        self._flat = flat
        self.elementwise = is_elementwise(optimizer)
        self._parts = parts_of(optimizer)
        self._part_of_group = [part for part in self._parts.values() for _ in part.param_groups]
        self._optimizers = stepping_in(optimizer)
        self._keepers = Keepers(self.elementwise, self._optimizers, self._part_of_group)
        self.may_draw = any(map(may_draw, self._optimizers.values()))
        self.description = describe(self._optimizers, flat.names)
        if isinstance(optimizer, NamedOptimizers):
            self.description["optimizers"] = [*self._parts]
        self._groups = own_groups(self._optimizers)
        memory = storages(slices)
        self._shared = {
            path: SharedState(inner, self._groups[path], memory)
            for path, inner in self._optimizers.items()
        }
        self._stepped = [
            Stepped(e.name, t, e.group, e.segment, e.range)  # type: ignore[arg-type]
            for t, e in zip(flat.tensors, flat.entries, strict=True)
        ]
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._written: dict[int, Mapping[str, Any]] = {}
        self._modal = [inner for inner in self._optimizers.values() if has_modes(inner)]
        if self.elementwise:
            whole = {id(tensor) for tensor in flat.tensors}
            for inner in self._optimizers.values():
                inner.state = FlatState(whole)
            self.own(slices)
        self.bind(slices)
        for inner in self._modal:
            inner.train()  # type: ignore[attr-defined]

    def leave_out(self, written: Sequence[Mapping[str, Any]]) -> None:
        """Keep no options that others write between steps, and who writes them keeps.

        Args:
            written: names of these options, for each of `groups`.
        """
        self._written = {id(g): names for g, names in zip(self.groups, written, strict=True)}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have parameters as they are to be evaluated and kept, within it.

        Of most optimizers they are those that are trained. Schedule-free ones train others, and
        have a mode for each.
        """
        if not self._modal:
            yield
            return
        trained = [flat.clone() for flat in self._flat.flats]
        self.end()
        try:
            yield
        finally:
            for inner in self._modal:
                inner.train()  # type: ignore[attr-defined]
            self._flat.take_back()
            # Going back by a formula would round.
            for flat, own in zip(self._flat.flats, trained, strict=True):
                flat.copy_(own)

    def end(self) -> None:
        """Have parameters as they are to be kept, from now on."""
        for inner in self._modal:
            inner.eval()  # type: ignore[attr-defined]
        self._flat.take_back()

    def own(self, slices: Sequence[Sequence[Slice]]) -> None:
        """Step these parameters from now on; an optimizer's state is then lost.

        One that is not element-wise goes on stepping whole parameters.
        """
        for own in self._shared.values():
            own.storages = storages(slices)
        for inner in self._optimizers.values():
            inner.state.clear()
        if self.elementwise:
            parts = self._part_of_group
            self._stepped = pieces(self._optimizer, parts, self._flat, slices)

    def move(self, flat: FlatTensors, slices: Sequence[Sequence[Slice]]) -> None:
        """Step other memory from now on; the optimizer's state is then lost.

        Args:
            flat: trainable parameters in flat memory, in the groups that they were in.
            slices: what to step, for each segment.
        """
        assert self.elementwise, "others step whole parameters, which are never moved"
        self._flat = flat
        self.own(slices)
        self.bind(slices)

    def bind(self, slices: Sequence[Sequence[Slice]]) -> None:
        """Take gradients from this memory from now on."""
        if self.elementwise:
            # Once for all steps: these gradients are views of the memory that reductions fill.
            for part in self._stepped:
                own = next(own for own in slices[part.segment] if is_in(part.range, own.range))
                part.tensor.grad = own.gradient[within(part.range, own.range)]
        else:
            gradients = [of_segment[0].gradient for of_segment in slices]
            self._gradients = [
                (tensor, self._flat.view(gradients, entry))
                for tensor, entry in zip(self._flat.tensors, self._flat.entries, strict=True)
            ]

    def step(
        self,
        key: int = 0,
        phase: str = "",
        closure: Callable[[], float] | None = None,
        loss: float = 0.0,
    ) -> None:
        """One optimizer step, with the learning rates that groups have.

        Args:
            key: seed of the random numbers that the step may draw.
            phase: the phase, where each has an optimizer of its own.
            closure: evaluates the step's whole batch again, for an optimizer that needs it: puts
                the mean gradient in memory, and returns the mean loss. If it raises an exception,
                parameters and state are as before.
            loss: mean loss of the first pass, whose gradient is in memory.
        """
        # For this step only: the next backward pass would add to a gradient that stays.
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self.may_draw:
            seed_all(key)  # the same random numbers on every rank
        self._num_steps += 1
        if closure is not None:
            self._search(closure, loss, key)
        else:
            for optimizer in self._in_turn(phase):
                self._step(optimizer)
        for parameter, _ in self._gradients:
            parameter.grad = None
        if not self.elementwise:
            self._flat.take_back()

    def first_group(self, phase: str = "") -> dict[str, Any]:
        """The first parameter group of the first optimizer that steps."""
        return self._in_turn(phase)[0].param_groups[0]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, each once."""
        return [group for groups in self._groups.values() for group in groups]

    def _in_turn(self, phase: str) -> list[optim.Optimizer]:
        """Those that step: that of a phase, or all."""
        return [self._parts[phase]] if phase in self._parts else [*self._parts.values()]

    def _step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        is_watched = self.may_draw and self._sharded
        before = global_state() if is_watched else None
        outside = self._outside(optimizer)
        if closure is not None:
            optimizer.step(closure)
        else:
            fast_steps.step(optimizer)
        if outside and (moved := differing(outside, self._outside(optimizer))):
            self._moved = f"{moved[0].rstrip('!')}: is changed by {type(optimizer).__name__}.step"
        if is_watched and global_state() != before:
            self._drawing = type(optimizer).__name__

    def _search(self, closure: Callable[[], float], loss: float, key: int) -> None:
        """Step by a closure; undo everything if that is interrupted."""
        assert not self.elementwise, "who needs a closure steps whole parameters"
        parameters, state = [flat.clone() for flat in self._flat.flats], self.state()
        versions = [gradient._version for _, gradient in self._gradients]

        def is_first_pass() -> bool:
            is_same = versions == [gradient._version for _, gradient in self._gradients]
            return is_same and all(map(torch.equal, self._flat.flats, parameters))

        def evaluate() -> Tensor:
            self._flat.take_back()
            value = loss
            # L-BFGS begins with a call at the present parameters, whose gradient is there.
            if not is_first_pass():
                with torch.enable_grad():  # an optimizer's own step records no graph
                    value = closure()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            if self.may_draw:
                seed_all(key)  # passes have drawn as often as this rank has microbatches
            # Some call `backward` on it, which then does nothing more.
            return torch.tensor(
                value, dtype=torch.float64, device=parameters[0].device, requires_grad=True
            )

        try:
            self._step(self._optimizer, evaluate)
        except BaseException:
            for parameter, _ in self._gradients:
                parameter.grad = None
            self._flat.take_back()
            for flat, before in zip(self._flat.flats, parameters, strict=True):
                flat.copy_(before)
            self.load_state(state)
            raise

    def _outside(self, optimizer: optim.Optimizer) -> dict[str, str]:
        """State of optimizers' code beside their objects, in some steps: globals and closures."""
        if self._num_steps & (self._num_steps - 1):
            return {}
        roots: dict[str, object] = {}
        for kind in {type(one) for one in stepping_in(optimizer).values() if may_draw(one)}:
            roots |= {kind.__name__: kind} | module_globals(kind)
        return hidden_state(roots)

    @property
    def optimizer(self) -> optim.Optimizer:
        """The outermost one; over flat tensors if it is element-wise."""
        return self._optimizer

    @property
    def num_groups(self) -> dict[str, int]:
        """Number of groups of each named optimizer and of those in it; "" names a single one."""
        return {
            name: sum(map(len, own_groups(stepping_in(part)).values()))
            for name, part in self._parts.items()
        }

    def check_state(self) -> None:
        """Make sure of what can only be known after a step: that all state can be saved.

        Raises:
            TaskError: naming what cannot.
            ConfigError: the optimizer draws random numbers, and is sharded.
        """
        if self._drawing:
            raise ConfigError(
                f"build_optimizer: {self._drawing} draws random numbers when it steps, other ones "
                "on each rank that steps a part of the parameters; set sharding=none, mesh.tp=1 "
                "and mesh.pp=1"
            )
        for _ in self._keepers.states(self._stepped):
            pass
        ids = {id(part.tensor) for part in self._stepped}
        for own in self._shared.values():
            own.check(ids)
        if self._moved:
            raise TaskError(
                f"{self._moved}, and no checkpoint holds it; keep it in the optimizer's `state`, "
                "its groups or its attributes"
            )

    def by_segment(self) -> dict[tuple[int, str], list[tuple[Range, Tensor]]]:
        """Tensors of an element-wise optimizer's state of what is stepped here: by segment, key."""
        found: dict[tuple[int, str], list[tuple[Range, Tensor]]] = {}
        for part, name, value in self._keepers.states(self._stepped):
            if isinstance(value, Tensor) and value.dim() > 0:
                found.setdefault((part.segment, name), []).append((part.range, value))
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the optimizer's state, as far as there are some."""
        states = [s for inner in self._optimizers.values() for s in inner.state.values()]
        return [v for state in states for v in state.values() if isinstance(v, Tensor)]

    def state(self, tensors: bool = True, device: str | None = None) -> OptimizerState:
        """Copies of all state; flats are zero where not owned.

        Args:
            tensors: whether flats are wanted; else there are their keys only.
            device: where the copies are; None for where the state is.

        Raises:
            TaskError: something cannot be saved.
        """
        state, home = OptimizerState({}, {}, {}, {}), device or self._flat.flats[0].device
        for part, name, value in self._keepers.states(self._stepped):
            kept: dict[str, Any] = TENSOR
            if are_tensors(value):
                kept = {"tensors": len(value)}
                for each, tensor in zip(tensor_names(name, kept), value, strict=True):
                    state.tensors[f"{each}/{part.owner}"] = tensor.detach().to(home, copy=True)
            elif not isinstance(value, Tensor) or value.dim() == 0:
                kept = to_json(value, part.tensor.device)
            elif self.elementwise and not tensors:
                state.flats[name] = []
            elif self.elementwise:
                if name not in state.flats:
                    state.flats[name] = [torch.zeros_like(f, device=home) for f in self._flat.flats]
                state.flats[name][part.segment][part.range.first : part.range.last] = value
            else:
                state.tensors[f"{name}/{part.owner}"] = value.detach().to(home, copy=True)
            state.scalars.setdefault(part.owner, {})[name] = kept
        for part in self._stepped if self._modal else ():
            state.tensors[f"{_TRAINED}/{part.owner}"] = part.tensor.detach().to(home, copy=True)
            state.scalars.setdefault(part.owner, {})[_TRAINED] = TENSOR
        state.shared.update({path: own.values(self._written) for path, own in self._shared.items()})
        return state

    def load_state(self, state: OptimizerState) -> None:
        """Restore what `state` gave, with complete flats.

        Raises:
            CheckpointError: it is not the state of such an optimizer.
        """
        # State that the snapshot lacks, as before the first step, must not stay either.
        for inner in self._optimizers.values():
            inner.state.clear()
        for path, own in self._shared.items():
            own.load(state.shared.get(path, {}))
        for part in self._stepped:
            for name, value in state.kept_for(part.owner).items():
                if name == _TRAINED and self._modal:
                    part.tensor.data.copy_(state.tensors[f"{name}/{part.owner}"])
                    continue
                inner, key = self._keepers.find(part, name)
                inner.state[part.tensor][key] = self._restored(state, part, name, key, value)

    def _restored(
        self, state: OptimizerState, part: Stepped, name: str, key: str, value: Any
    ) -> Any:
        if value != TENSOR and (names := tensor_names(name, value)):
            tensors = [state.tensors[f"{each}/{part.owner}"] for each in names]
            return [tensor.to(part.tensor.device, copy=True) for tensor in tensors]
        if value != TENSOR:
            group = self._optimizer.param_groups[part.group]
            return from_json(value, home_of(key, group, part.tensor.device))
        if self.elementwise:
            return state.elements(name, part.segment, part.range)
        return state.tensors[f"{name}/{part.owner}"].to(part.tensor.device, copy=True)
