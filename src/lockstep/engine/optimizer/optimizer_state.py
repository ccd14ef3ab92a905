"""An optimizer's state by name: what checkpoints hold and what joining ranks are sent.

Torch's optimizers keep all of it in `state[parameter]`. Others also keep numbers in their groups
(schedule-free and Prodigy kinds), in attributes, or under keys that are no parameters.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, optim

from lockstep.engine.audit.reachable import fingerprints
from lockstep.errors import CheckpointError, TaskError, shared
from lockstep.parallel.layout import Range

Scalars = dict[str, dict[str, Any]]
"""By owner (a parameter, or the number of an element-wise optimizer's group), then by key: a JSON
value, `TENSOR` for state that is kept as a tensor, or `{"tensors": n}` for a list of n tensors."""

TENSOR = {"tensor": True}

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
"""Data types that checkpoints can hold, by name."""
_MOST_TENSORS = 1 << 20
"""Of a list that is a state of a parameter."""
_SET_BY_ENGINE = frozenset({"params", "lr", "fused"})


class OptimizerState(NamedTuple):
    """An optimizer's whole state.

    Attributes:
        flats: tensors of an element-wise optimizer: by key, laid out as the parameters.
        tensors: tensors of any other, by "key/parameter".
        scalars: state of parameters that is no tensor, and the keys of their tensors, by name.
        shared: state that belongs to no single parameter, as JSON, by the optimizer's path.
        read: makes a tensor of the elements of a key in a segment, where `flats` have keys only.
    """

    flats: dict[str, list[Tensor]]
    tensors: dict[str, Tensor]
    scalars: Scalars
    shared: dict[str, Any]
    read: Callable[[str, int, Range], Tensor] | None = None

    def elements(self, key: str, segment: int, elements: Range) -> Tensor:
        """A new tensor with elements of a key in a segment."""
        if self.read is not None:
            return self.read(key, segment, elements)
        return self.flats[key][segment][elements.slice].clone()

    def kept_for(self, owner: str) -> dict[str, Any]:
        """An owner's scalars, and which tensors it has: all, if the state does not say."""
        values = self.scalars.get(owner, {})
        says = any(v == TENSOR for kept in self.scalars.values() for v in kept.values())
        if says:
            return values
        tensors = {n.partition("/")[0] for n in self.tensors if n.partition("/")[2] == owner}
        return values | dict.fromkeys([*self.flats, *tensors], TENSOR)


@functools.cache
def _torchs_own() -> frozenset[str]:
    """Attributes that torch gives optimizers, of which no result depends."""
    # Made when asked for: by then nobody imports the compiler for it (`keep_compiler_out`).
    optimizer = optim.SGD([torch.zeros(1)], lr=0.0)
    return frozenset(vars(optimizer)) | {"_need_device_dtype_check_for_fused"}


def is_savable(tensor: Tensor) -> bool:
    """Whether checkpoints can hold it."""
    return tensor.layout is torch.strided and tensor.dtype in DTYPES.values()


def are_tensors(value: Any) -> bool:
    """Whether a state of a parameter is a list of tensors that checkpoints hold one by one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, Tensor) and v.dim() > 0 and is_savable(v) for v in value)
    )


def tensor_names(name: str, kept: Any) -> list[str]:
    """The names of the tensors that a state of a parameter is kept as, in `OptimizerState.tensors`.

    Args:
        name: name of the state.
        kept: what `OptimizerState.scalars` has of it.

    Returns:
        One name, those of the tensors of a list, or none if the state is no tensor.
    """
    match kept:
        case {"tensor": True}:
            return [name]
        case {"tensors": int(count)} if 0 < count < _MOST_TENSORS:
            return [f"{name}.{index}" for index in range(count)]
    return []


def dtype_name(dtype: torch.dtype) -> str:
    """The key of `DTYPES`."""
    return str(dtype).removeprefix("torch.")


def to_json(value: Any, home: torch.device | None = None) -> Any:
    """A value as JSON, of which `from_json` makes an equal one.

    Args:
        value: None, a number, text, a tensor of no dimensions, or lists, tuples, dicts of these.
        home: the device where tensors are expected; where one is instead is noted.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.dim() == 0 and is_savable(value):
        scalar = {"dtype": dtype_name(value.dtype), "value": value.item()}
        return scalar if home in (None, value.device) else scalar | {"device": value.device.type}
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return {"numpy": value.dtype.name, "value": value.item()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [to_json(v, home) for v in value]}
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return {"dict": {k: to_json(v, home) for k, v in value.items()}}
    raise TypeError(type(value).__name__)


def from_json(value: Any, home: torch.device) -> Any:
    """The inverse of `to_json`.

    Raises:
        CheckpointError: it is nothing that `to_json` makes.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case {"dtype": dtype, "value": number} if dtype in DTYPES:
            place = torch.device("cpu") if value.get("device") == "cpu" else home
            return torch.tensor(number, dtype=DTYPES[dtype], device=place)
        case {"numpy": dtype, "value": number} if dtype in DTYPES:
            return np.dtype(dtype).type(number)
        case {"list": list(values)}:
            return [from_json(v, home) for v in values]
        case {"tuple": list(values)}:
            return tuple(from_json(v, home) for v in values)
        case {"dict": dict(values)}:
            return {k: from_json(v, home) for k, v in values.items()}
    raise shared(
        CheckpointError(f"the optimizer's state is damaged: {str(value)[:60]} is no value of it")
    )


def home_of(key: str, group: Mapping[str, Any], device: torch.device) -> torch.device:
    """Where an optimizer keeps a number that belongs to a parameter.

    Args:
        key: name of the number.
        group: group of the parameter.
        device: device of the parameter.
    """
    is_counted_there = key != "step" or group.get("fused") or group.get("capturable")
    # Where torch's optimizers count steps, but for these.
    return device if is_counted_there else torch.device("cpu")


def describe(optimizers: Mapping[str, optim.Optimizer], names: Mapping[int, str]) -> dict[str, Any]:
    """What a run's result depends on, by words for people: classes, hyperparameters, groups.

    Args:
        optimizers: optimizers by path, before their first step.
        names: names of the parameters that they step, by the parameter's id.
    """
    facts: dict[str, Any] = {}
    for path, optimizer in optimizers.items():
        label = f"optimizer {path}".rstrip()
        facts[label] = type(optimizer).__qualname__
        facts[f"number of groups of {label}"] = len(optimizer.param_groups)
        for index, group in enumerate(optimizer.param_groups):
            stepped = [p for p in group["params"] if id(p) in names]
            digest = hashlib.sha256("\n".join(names[id(p)] for p in stepped).encode())
            described = {
                "number of tensors": len(stepped),
                "number of elements": sum(p.numel() for p in stepped),
                "SHA-256 of parameters' names": digest.hexdigest(),
            } | {k: _plain(v) for k, v in group.items() if k != "params"}
            facts |= {f"{key} of group {index} of {label}": v for key, v in described.items()}
    return facts


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON for people; of what JSON has no form for, the type's name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return type(value).__qualname__


class SharedState:
    """What one optimizer keeps that belongs to no single parameter.

    Attributes:
        storages: addresses of the memory of parameters and gradients.
    """

    def __init__(
        self, optimizer: optim.Optimizer, groups: list[dict[str, Any]], storages: Set[int]
    ) -> None:
        """Record everything as it is before the first step.

        Args:
            optimizer: optimizer to look through.
            groups: groups of the optimizer, but for those that are another optimizer's too.
            storages: addresses of the memory of parameters and gradients.
        """
        self._optimizer = optimizer
        self._groups = groups
        self.storages = storages
        parameters = [p for group in groups for p in group["params"]]
        self._home = parameters[0].device if parameters else torch.device("cpu")
        self._first_groups = [self._jsons(group) for group in groups]
        self._first_attributes = self._jsons(self._attributes())
        self._first_hidden = self._hidden()

    def values(self, written: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """What is not as it was at first, as JSON; None for groups that this rank does not step.

        Args:
            written: by a group's id, options of it that others keep.
        """
        groups = [
            _changed(self._jsons(group, written.get(id(group), {})), first)
            if group["params"]
            else None
            for group, first in zip(self._groups, self._first_groups, strict=True)
        ]
        attributes = _changed(self._jsons(self._attributes()), self._first_attributes)
        state = {k: v for k, v in self._optimizer.state.items() if isinstance(k, str)}
        return {"groups": groups, "attributes": attributes, "state": self._jsons(state)}

    def load(self, values: Mapping[str, Any]) -> None:
        """Make everything as it was when `values` was taken; the optimizer's `state` is empty.

        Raises:
            CheckpointError: these are no such values.
        """
        saved = values.get("groups") or [{} for _ in self._groups]
        if len(saved) != len(self._groups):
            raise shared(
                CheckpointError(
                    f"the optimizer's state is damaged: it has {len(saved)} groups, not "
                    f"{len(self._groups)}"
                )
            )
        for group, first, later in zip(self._groups, self._first_groups, saved, strict=True):
            self._assign(group, self._jsons(group), first | (later or {}))
        later = values.get("attributes", {})
        now = self._jsons(self._attributes())
        self._assign(vars(self._optimizer), now, self._first_attributes | later)
        state: dict[Any, Any] = self._optimizer.state
        state.update({k: from_json(v, self._home) for k, v in values.get("state", {}).items()})

    def check(self, parameters: Set[int]) -> None:
        """Refuse what no checkpoint would hold.

        Args:
            parameters: ids of the tensors that are stepped.

        Raises:
            TaskError: naming it.
        """
        name = type(self._optimizer).__name__
        hidden = self._hidden()
        changed = [k for k in hidden if hidden[k] != self._first_hidden.get(k)]
        for key, value in self._optimizer.state.items():
            is_empty = isinstance(value, Mapping) and not value  # as of a frozen parameter
            if id(key) in parameters or is_empty:
                continue
            try:
                to_json(value)
            except TypeError:
                changed.append(f"state[{key!r}]")
            if not isinstance(key, str):
                changed.append(f"state of a {type(key).__name__} that it does not step")
        if changed:
            raise TaskError(
                f"build_optimizer: {name} changes its {changed[0]} when it steps, which no "
                "checkpoint holds; keep tensors in self.state[parameter], numbers in "
                "self.param_groups or attributes, and random numbers to the global generators"
            )

    def _jsons(self, values: Mapping[Any, Any], without: Collection[str] = ()) -> dict[str, Any]:
        """The values that have a form in JSON, by name."""
        jsons = {}
        for key, value in values.items():
            if key not in _SET_BY_ENGINE and key not in without:
                try:
                    jsons[key] = to_json(value, self._home)
                except TypeError:
                    continue
        return jsons

    def _assign(self, target: dict[str, Any], now: Mapping[str, Any], then: dict[str, Any]) -> None:
        for key in now.keys() - then.keys():
            del target[key]
        for key, value in _changed(then, now).items():
            target[key] = from_json(value, self._home)

    def _attributes(self) -> dict[str, Any]:
        own = _torchs_own()
        return {k: v for k, v in vars(self._optimizer).items() if k not in own}

    def _hidden(self) -> dict[str, object]:
        """Fingerprints of all that has no form in JSON."""
        values = self._attributes()
        for index, group in enumerate(self._groups):
            values |= {f"param_groups[{index}][{k!r}]": v for k, v in group.items()}
        shown = self._jsons(values)
        rest = {k: v for k, v in values.items() if k not in shown and not k.endswith("['params']")}
        return fingerprints(rest, self.storages)


def _changed(now: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in now.items() if k not in first or first[k] != v}
