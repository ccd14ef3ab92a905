"""What an optimizer steps on this rank, and steps of torch's own optimizers at less cost.

torch wraps `step` for its compiler, its profiler and its hooks. For a small model these wrappers
take several times as long as the arithmetic, so they are skipped where none of them is in use.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from lockstep.engine.flat_tensors import FlatTensors, Slice
from lockstep.engine.optimizer.choice import takes_closure
from lockstep.engine.optimizer.optimizer_state import are_tensors, is_savable, to_json
from lockstep.errors import CheckpointError, TaskError, shared
from lockstep.optim.gradient_based import bare_step
from lockstep.parallel.layout import Range, within

_FUSED_ANYWHERE = (optim.SGD, optim.Adam, optim.AdamW)
_FUSED_ON_CPU = (*_FUSED_ANYWHERE, optim.Adagrad)


class Stepped(NamedTuple):
    """A tensor that an optimizer steps: a whole parameter, or a part of flat memory."""

    owner: str
    """The key that its state is kept under: its name, or the number of its group."""
    tensor: nn.Parameter
    group: int
    segment: int
    range: Range


def check_savable(
    optimizer: optim.Optimizer, own: Tensor, is_flat: bool, key: str, value: Any
) -> None:
    """Refuse state of a parameter that no checkpoint can hold.

    Args:
        optimizer: optimizer that keeps the state.
        own: what it is kept of.
        is_flat: whether that is a part of flat memory.
        key: key of the state.
        value: the state.

    Raises:
        TaskError: naming the key.
    """
    name = type(optimizer).__name__
    if are_tensors(value) and not is_flat:
        return
    if isinstance(value, Tensor) and value.dim() > 0 and is_savable(value):
        if is_flat and (value.shape, value.dtype) != (own.shape, own.dtype):
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


class FlatState(defaultdict[Any, Any]):
    """State of an optimizer that steps flat tensors; parameters of the model have none.

    Args:
        whole: ids of the model's parameters.
    """

    def __init__(self, whole: Set[int]) -> None:
        super().__init__(dict)
        self._whole = whole

    def _check(self, key: object) -> None:
        if id(key) in self._whole:
            raise TaskError(
                "optimizer.state[parameter]: the optimizer steps flat tensors, which are in its "
                "param_groups, and keeps no state of the model's parameters; go by the groups, or "
                "derive a class from it with `elementwise = False`, which steps whole parameters"
            )

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of any dict.

        Raises:
            TaskError: `key` is a parameter of the model.
        """
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of any dict.

        Raises:
            TaskError: `key` is a parameter of the model.
        """
        self._check(key)
        return super().pop(key, *default)


class Keepers:
    """Which of the optimizers that step keeps which state, by name."""

    def __init__(
        self,
        is_flat: bool,
        optimizers: Mapping[str, optim.Optimizer],
        part_of_group: Sequence[optim.Optimizer],
    ) -> None:
        """Keep references to them.

        Args:
            is_flat: whether all are element-wise, so that they step flat tensors.
            optimizers: those that step, by path.
            part_of_group: for each group, the one of those that the task has named.
        """
        self._is_flat = is_flat
        self._optimizers = optimizers
        self._part_of_group = part_of_group

    def states(self, stepped: Iterable[Stepped]) -> Iterator[tuple[Stepped, str, Any]]:
        """All state of what is stepped, by name.

        Raises:
            TaskError: something cannot be saved.
        """
        for part in stepped:
            for prefix, inner in self.of(part).items():
                kept_here = inner.state.get(part.tensor, {})
                if not isinstance(kept_here, Mapping):
                    raise TaskError(
                        f"build_optimizer: {type(inner).__name__} keeps a "
                        f"{type(kept_here).__name__} as state of a parameter; it must be a dict"
                    )
                for key, value in kept_here.items():
                    check_savable(inner, part.tensor, self._is_flat, key, value)
                    yield part, prefix + key, value

    def of(self, part: Stepped) -> dict[str, optim.Optimizer]:
        """Those that may keep state of what is stepped, by what the names of it begin with.

        Element-wise ones hold no others, and no two have the same parameter. So they need no
        prefix, and what is stepped by several has one flat tensor for each key that they share.
        """
        if self._is_flat:
            return {"": self._part_of_group[part.group]}
        return {f"{path}." if path else "": inner for path, inner in self._optimizers.items()}

    def find(self, part: Stepped, name: str) -> tuple[optim.Optimizer, str]:
        """The optimizer that keeps a state, and its key there, by the name that `states` gave.

        Raises:
            CheckpointError: there is no such optimizer.
        """
        keepers = self.of(part)
        prefixes = [prefix for prefix in keepers if name.startswith(prefix)]
        if not prefixes:
            raise shared(
                CheckpointError(f"the optimizer's state is damaged: {name} is no optimizer's")
            )
        prefix = max(prefixes, key=len)
        return keepers[prefix], name.removeprefix(prefix)


_ADAM = sys.modules[optim.Adam.__module__].__file__
"""The file in which torch defines the step of the optimizers in `_FUSED`."""

_FUSED: dict[type[optim.Optimizer], Callable[..., None]] = {
    optim.Adam: torch._fused_adam_,
    optim.AdamW: torch._fused_adamw_,
}


def step(optimizer: optim.Optimizer) -> None:
    """One step of an optimizer.

    One of torch's own that nobody watches is stepped bare: the same arithmetic, and no import of
    the compiler.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        _step_foreign(optimizer)
        return
    plain = bare_step(optimizer)
    if plain is None:
        optimizer.step()
        return
    is_recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # `torch.no_grad` takes five times as long
    try:
        if plain.__code__.co_filename != _ADAM or not _step_fused(optimizer):
            plain(optimizer)
    finally:
        torch._C._set_grad_enabled(is_recording)


def _step_foreign(optimizer: optim.Optimizer) -> None:
    """Step an optimizer of another package, which may want a closure that it was not given.

    Raises:
        TaskError: it seems to.
    """
    try:
        optimizer.step()
    except (AssertionError, TypeError) as error:
        if not takes_closure(optimizer):
            raise
        name = type(optimizer).__name__
        raise shared(
            TaskError(
                f"build_optimizer: {name}.step raised {type(error).__name__}: {error}. If it "
                f"evaluates the loss again, say `needs_closure = True` in {name}"
            )
        ) from error


def _step_fused(optimizer: optim.Optimizer) -> bool:
    """Call the kernel that torch would come to call for each group.

    Returns:
        Whether that is all there is to do. If not, nothing was done: torch has to do the rest.
    """
    kernel = _FUSED.get(type(optimizer))
    if kernel is None or hasattr(optimizer, "grad_scale"):
        return False
    kept = [_kept(optimizer, group) for group in optimizer.param_groups]
    if None in kept:
        return False
    for group, states in zip(optimizer.param_groups, kept, strict=True):
        if states:
            _call(kernel, group, states)
    return True


def _kept(optimizer: optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What the optimizer keeps for each parameter of a group; None if torch has more to do."""
    # A generator would take longer than what it looks at.
    more = group["amsgrad"] or group["differentiable"] or group["capturable"] or group["foreach"]
    if more or not group["fused"] or isinstance(group["lr"], Tensor):
        return None
    states = []
    for parameter in group["params"]:
        state = dict.get(optimizer.state, parameter)  # not by the check of `FlatState`
        first = group["params"][0]
        is_plain = (parameter.dtype, parameter.device) == (first.dtype, first.device)
        # Where its kernel cannot count, torch has the count on the CPU.
        if not (is_plain and state and state["step"].device == first.device):
            return None
        if parameter.grad is None:
            return None
        states.append(state)
    return states


def _call(kernel: Callable[..., None], group: dict[str, Any], states: list[dict[str, Any]]) -> None:
    beta1, beta2 = group["betas"]
    steps = [state["step"] for state in states]
    if steps[0].is_cpu:
        for count in steps:
            count += 1
    else:
        torch._foreach_add_(steps, 1)
    kernel(
        group["params"],
        [parameter.grad for parameter in group["params"]],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def pieces(
    optimizer: optim.Optimizer,
    part_of_group: Sequence[optim.Optimizer],
    flat: FlatTensors,
    slices: Sequence[Sequence[Slice]],
) -> list[Stepped]:
    """Replace each group's parameters by what of its flat tensors is stepped here; returns that.

    Args:
        optimizer: an element-wise optimizer.
        part_of_group: for each of its groups, the optimizer inside of it that steps the group.
        flat: trainable parameters in flat memory.
        slices: what to step, for each segment.
    """
    stepped = []
    groups = optimizer.param_groups
    for part, group in zip(part_of_group, groups, strict=True):
        group["params"] = []
        kinds = _FUSED_ON_CPU if flat.flats[0].is_cpu else _FUSED_ANYWHERE
        if type(part) in kinds and not group.get("foreach"):
            group["fused"] = group["fused"] is not False
    for piece in flat.pieces:
        for own in slices[piece.segment]:
            first = max(piece.range.first, own.range.first)
            last = min(piece.range.last, own.range.last)
            if first < last:
                range_ = Range(first, last)
                parameter = nn.Parameter(own.parameters[within(range_, own.range)])
                groups[piece.group]["params"].append(parameter)
                stepped.append(
                    Stepped(str(piece.group), parameter, piece.group, piece.segment, range_)
                )
    return stepped
