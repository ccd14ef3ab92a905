"""A tree of tensors taken apart: what it is made of, as JSON, and its tensors by name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.engine.digests import tensors_digest
from lockstep.engine.optimizer.optimizer_state import is_savable
from lockstep.errors import TaskError

_MOST_LEVELS = 32
T = TypeVar("T")


@dataclass(frozen=True)
class Carry:
    """What a microbatch carries from one step to the next.

    Nobody changes it: a task is given a copy, and what it returns is copied.

    Attributes:
        structure: the tree as JSON, with the names of tensors in place of these.
        tensors: contiguous tensors by name: the keys and indices on the way there, joined by "/".
    """

    structure: Any
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, tree: Any, where: str) -> Carry:
        """Take a copy of a tree, without the graph that computed it.

        Args:
            tree: tensor, or dicts, lists and tuples of tensors, numbers, text and None.
            where: what returned it, for errors.

        Raises:
            TaskError: something in it cannot be kept.
        """
        tensors: dict[str, Tensor] = {}
        return cls(_taken(tree, (), where, tensors), tensors)

    @property
    def tree(self) -> Any:
        """The tree again, with copies of its tensors."""
        return _rebuilt(self.structure, {n: tensor.clone() for n, tensor in self.tensors.items()})

    def read(self, reader: Callable[[Any], T], where: str) -> T:
        """What a function makes of the tree, which it is given without copies.

        Args:
            reader: must not change it.
            where: what it is called, for errors.

        Raises:
            TaskError: it has changed a tensor.
        """
        before = [tensor._version for tensor in self.tensors.values()]
        made = reader(_rebuilt(self.structure, self.tensors))
        if [tensor._version for tensor in self.tensors.values()] != before:
            raise TaskError(f"{where}: changes the carry, which it may only read; take a copy")
        return made

    @property
    def digest(self) -> str:
        """SHA-256 of the structure and all tensors."""
        text = json.dumps(self.structure, sort_keys=True) + tensors_digest(self.tensors)
        return hashlib.sha256(text.encode()).hexdigest()


def check_carry(structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a structure that `Carry.of` has not made, or that does not go with these tensors.

    Raises:
        ValueError: says what is wrong.
    """
    names = list(_named(structure, 0))
    for name in dict.fromkeys([*names, *tensors]):
        if names.count(name) != 1 or name not in tensors:
            raise ValueError(f"tensor {name!r} is not there just once")


def _taken(value: Any, path: tuple[str, ...], where: str, tensors: dict[str, Tensor]) -> Any:
    """The structure of a part of a tree; its tensors are added to `tensors`."""
    place = f"{where}: {'/'.join(path)}" if path else where
    if len(path) > _MOST_LEVELS:
        raise TaskError(f"{place}: more than {_MOST_LEVELS} levels; give a flatter tree")
    if isinstance(value, Tensor):
        if not is_savable(value):
            raise TaskError(
                f"{place}: a tensor of dtype {value.dtype} and layout {value.layout} cannot be "
                "kept from step to step; give a dense tensor of real numbers"
            )
        # Contiguous, as it would come back from a checkpoint: kernels may go by strides.
        tensors["/".join(path)] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": "/".join(path)}
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (float, str)):
        _check_leaf(value, place)
        return value
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str) or "/" in key:
                raise TaskError(f"{place}: the key {key!r} must be text without '/'")
            _check_leaf(key, place)
        return {"dict": {k: _taken(v, (*path, k), where, tensors) for k, v in value.items()}}
    if type(value) in (list, tuple):
        items = [_taken(v, (*path, str(i)), where, tensors) for i, v in enumerate(value)]
        return {type(value).__name__: items}
    raise TaskError(
        f"{place}: a {type(value).__name__} cannot be kept from step to step; give tensors, or "
        "dicts, lists and tuples of tensors, finite numbers, text and None"
    )


def _check_leaf(value: float | str, place: str) -> None:
    """Refuse numbers and text that no file could hold.

    Raises:
        TaskError: it is such.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(
            f"{place}: {value} is not finite, so it cannot be kept as a number; give a tensor"
        )
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TaskError(f"{place}: {value!r} is no text that UTF-8 can hold") from None


def _rebuilt(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    match structure:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": values}:
            return {key: _rebuilt(value, tensors) for key, value in values.items()}
        case {"list": values}:
            return [_rebuilt(value, tensors) for value in values]
        case {"tuple": values}:
            return tuple(_rebuilt(value, tensors) for value in values)
    return structure


def _named(structure: Any, level: int) -> Iterator[str]:
    """The names of the tensors in a structure.

    Raises:
        ValueError: it is no structure.
    """
    match structure:
        case _ if level > _MOST_LEVELS:
            raise ValueError("too many levels")
        case None | bool() | int() | float() | str():
            return
        case {"tensor": str(name), **rest} if not rest:
            yield name
        case {"dict": dict(values), **rest} if not rest:
            for value in values.values():
                yield from _named(value, level + 1)
        case {"list": list(items), **rest} | {"tuple": list(items), **rest} if not rest:
            for value in items:
                yield from _named(value, level + 1)
        case _:
            raise ValueError(f"{str(structure)[:60]} is no part of a carry")
