"""Stepping parameters: any torch optimizer, on flat tensors or slices of them where it can be.

An element-wise optimizer computes each element of a parameter from the same elements of its
gradient and state. So it may as well step one flat tensor instead of many parameters, or only the
slice of it that this rank owns, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from lockstep.data.random import global_state, seed_all
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.checkpoint.optimizer_state import (
    TENSOR,
    OptimizerState,
    SharedState,
    describe,
    from_json,
    is_savable,
    to_json,
)
from lockstep.engine.passes.phases import PhaseOptimizers
from lockstep.engine.step.flat import FlatTensors
from lockstep.engine.step.optimizer import is_elementwise, may_draw, own_groups
from lockstep.engine.step.slices import Slice, is_in, storages, within
from lockstep.errors import ConfigError, TaskError
from lockstep.parallel.layout import Range

_FUSED_ON_CPU = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


class _Stepped(NamedTuple):
    """A tensor that the optimizer steps: a whole parameter, or a part of flat memory."""

    owner: str
    """The key that its state is kept under: its name, or the number of its group."""
    tensor: nn.Parameter
    group: int
    segment: int
    range: Range


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
        self._has_drawn = False
        self._flat = flat
        self.elementwise = is_elementwise(optimizer)
        pairs = list(zip(flat.tensors, flat.entries, strict=True))
        self._optimizers = optimizers_in(optimizer)
        self.may_draw = any(map(may_draw, self._optimizers.values()))
        self.description = describe(self._optimizers, flat.names)
        self._groups = own_groups(self._optimizers)
        self._base_lr = [(g, g["lr"]) for groups in self._groups.values() for g in groups]
        memory = storages(slices)
        self._shared = {
            path: SharedState(inner, self._groups[path], memory)
            for path, inner in self._optimizers.items()
        }
        self._stepped = [
            _Stepped(e.name, t, e.group, e.segment, e.range)  # type: ignore[arg-type]
            for t, e in pairs
        ]
        self._gradients: list[tuple[Tensor, Tensor]] = []
        if self.elementwise:
            self.own(slices)
        self.bind(slices)

    def own(self, slices: Sequence[Sequence[Slice]]) -> None:
        """Step these parameters from now on; an optimizer's state is then lost."""
        for shared in self._shared.values():
            shared.storages = storages(slices)
        self._optimizer.state.clear()
        self._make_pieces(slices)

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

    def step(self, lr_factors: float | Sequence[float], key: int = 0, phase: str = "") -> None:
        """One optimizer step.

        Args:
            lr_factors: what base learning rates are multiplied with, or that of each group.
            key: seed of the random numbers that the step may draw.
            phase: the phase, where each has an optimizer of its own.
        """
        if isinstance(lr_factors, float):
            lr_factors = [lr_factors] * len(self._base_lr)
        for (group, lr), factor in zip(self._base_lr, lr_factors, strict=True):
            group["lr"] = lr * factor
        # For this step only: the next backward pass would add to a gradient that stays.
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        optimizer = self._of(phase)
        if self.may_draw:
            self._step_seeded(optimizer, key)
        else:
            optimizer.step()
        for parameter, _ in self._gradients:
            parameter.grad = None
        if not self.elementwise:
            self._flat.take_back()

    def lr(self, lr_factors: Sequence[float], phase: str = "") -> float:
        """Learning rate of the first parameter group, or of that of a phase's optimizer."""
        first = self._of(phase).param_groups[0]
        index = next(i for i, (group, _) in enumerate(self._base_lr) if group is first)
        return float(self._base_lr[index][1] * lr_factors[index])

    def _of(self, phase: str) -> optim.Optimizer:
        whole = self._optimizer
        return whole.by_phase[phase] if isinstance(whole, PhaseOptimizers) else whole

    def _step_seeded(self, optimizer: optim.Optimizer, key: int) -> None:
        """Step with the same random numbers on every rank."""
        seed_all(key)
        before = global_state() if self._sharded else None
        optimizer.step()
        self._has_drawn |= self._sharded and global_state() != before

    @property
    def optimizer(self) -> optim.Optimizer:
        """The outermost one; over flat tensors if it is element-wise."""
        return self._optimizer

    @property
    def num_groups(self) -> int:
        """Number of parameter groups, those of optimizers inside the outermost one included."""
        return len(self._base_lr)

    def check_state(self) -> None:
        """Make sure of what can only be known after a step: that all state can be saved.

        Raises:
            TaskError: naming what cannot.
            ConfigError: the optimizer draws random numbers, and is sharded.
        """
        if self._has_drawn:
            raise ConfigError(
                f"build_optimizer: {type(self._optimizer).__name__} draws random numbers when it "
                "steps, other ones on each rank that steps a part of the parameters; set "
                "sharding=none, mesh.tp=1 and mesh.pp=1"
            )
        for _ in self._states():
            pass
        ids = {id(part.tensor) for part in self._stepped}
        for shared in self._shared.values():
            shared.check(ids)

    def state_of(self, segment: int, key: str) -> list[tuple[Range, Tensor]]:
        """A key of an element-wise optimizer's state, of what is stepped here of a segment."""
        return [
            (part.range, value)
            for part, name, value in self._states()
            if part.segment == segment and name == key
        ]

    def state(self, tensors: bool = True) -> OptimizerState:
        """Copies of all state; flats are zero where not owned.

        Args:
            tensors: whether flats are wanted; else there are their keys only.

        Raises:
            TaskError: something cannot be saved.
        """
        state = OptimizerState({}, {}, {}, {})
        for part, name, value in self._states():
            kept = TENSOR
            if not isinstance(value, Tensor) or value.dim() == 0:
                kept = to_json(value, part.tensor.device)
            elif self.elementwise and not tensors:
                state.flats[name] = []
            elif self.elementwise:
                if name not in state.flats:
                    state.flats[name] = [torch.zeros_like(f) for f in self._flat.flats]
                state.flats[name][part.segment][part.range.first : part.range.last] = value
            else:
                state.tensors[f"{name}/{part.owner}"] = value.detach().clone()
            state.scalars.setdefault(part.owner, {})[name] = kept
        state.shared.update({path: shared.values() for path, shared in self._shared.items()})
        return state

    def load_state(self, state: OptimizerState) -> None:
        """Restore what `state` gave, with complete flats.

        Raises:
            CheckpointError: it is not the state of such an optimizer.
        """
        # State that the snapshot lacks, as before the first step, must not stay either.
        for inner in self._optimizers.values():
            inner.state.clear()
        for path, shared in self._shared.items():
            shared.load(state.shared.get(path, {}))
        for part in self._stepped:
            for name, value in state.kept_for(part.owner).items():
                path, key = self._split(name)
                inner = self._optimizers[path]
                inner.state[part.tensor][key] = self._restored(state, part, name, key, value)

    def _restored(
        self, state: OptimizerState, part: _Stepped, name: str, key: str, value: Any
    ) -> Any:
        if value != TENSOR:
            home = part.tensor.device
            group = self._optimizer.param_groups[part.group]
            if key == "step" and not (group.get("fused") or group.get("capturable")):
                home = torch.device("cpu")  # where torch's optimizers count, but for these
            return from_json(value, home)
        if self.elementwise:
            first, last = part.range
            return state.flats[name][part.segment][first:last].clone()
        return state.tensors[f"{name}/{part.owner}"].to(part.tensor.device, copy=True)

    def _make_pieces(self, slices: Sequence[Sequence[Slice]]) -> None:
        """Replace each group's parameters by what of its flat tensors is stepped here."""
        self._stepped = []
        for group in self._optimizer.param_groups:
            group["params"] = []
            if type(self._optimizer) in _FUSED_ON_CPU and not group.get("foreach"):
                group["fused"] = group["fused"] is not False
        for piece in self._flat.pieces:
            for own in slices[piece.segment]:
                part = Range(
                    max(piece.range.first, own.range.first), min(piece.range.last, own.range.last)
                )
                if part.first < part.last:
                    parameter = nn.Parameter(own.parameters[within(part, own.range)])
                    self._optimizer.param_groups[piece.group]["params"].append(parameter)
                    self._stepped.append(
                        _Stepped(str(piece.group), parameter, piece.group, piece.segment, part)
                    )

    def _states(self) -> Iterator[tuple[_Stepped, str, Any]]:
        """All state of what is stepped, by key; those of inner optimizers behind their path.

        Raises:
            TaskError: something cannot be saved.
        """
        for part in self._stepped:
            for path, inner in self._optimizers.items():
                kept_here = inner.state.get(part.tensor, {})
                if not isinstance(kept_here, Mapping):
                    raise TaskError(
                        f"build_optimizer: {type(inner).__name__} keeps a "
                        f"{type(kept_here).__name__} as state of a parameter; it must be a dict"
                    )
                for key, value in kept_here.items():
                    self._check_savable(part, key, value)
                    yield part, f"{path}.{key}" if path else key, value

    def _check_savable(self, part: _Stepped, key: str, value: Any) -> None:
        name = type(self._optimizer).__name__
        if isinstance(value, Tensor) and value.dim() > 0 and is_savable(value):
            own = part.tensor
            if self.elementwise and (value.shape, value.dtype) != (own.shape, own.dtype):
                raise TaskError(
                    f"build_optimizer: {name} keeps state {key!r} of {value.dtype} "
                    f"{tuple(value.shape)} for parameters of {own.dtype} {tuple(own.shape)}; that "
                    "of an element-wise optimizer must be like them: leave out `elementwise = True`"
                )
            return
        try:
            to_json(value)
        except TypeError as error:
            raise TaskError(
                f"build_optimizer: {name} keeps state {key!r} of type {error}, which a checkpoint "
                "cannot hold; use numbers and dense tensors"
            ) from None

    def _split(self, name: str) -> tuple[str, str]:
        """The path of the optimizer and the key that `_states` made a name of."""
        paths = sorted((p for p in self._optimizers if p), key=len, reverse=True)
        prefix = next((p for p in paths if name.startswith(f"{p}.")), "")
        return prefix, name[len(prefix) + 1 :] if prefix else name
