"""Values that outlive a pass: constants, which no pass may change, and caches, which it may fill.

A pass would change parameters and constant buffers once for each microbatch of this rank, so the
result would depend on the number of ranks. Parameters are moved to other memory than a task has
given them: one flat array, or that of a shard or slice. The same object moves with them, as a tied
weight does; a view, or another parameter over the same memory, would keep the initial values.

Caches are cleared for a while to see whether they are caches: their content can be computed again,
and the results are the same. What was stored of an earlier model, of other samples or of a count of
passes cannot.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.engine.audit.hidden_state import Walk, has_memory, module_globals
from lockstep.engine.audit.reachable import is_library, modules_around
from lockstep.engine.flat_tensors import given_other_memory
from lockstep.engine.passes.buffers import changed_in_pass, same_bits, tensor_places
from lockstep.engine.task import Task
from lockstep.errors import TaskError
from lockstep.nn.holding import is_released

_MOST_COPIED = 1 << 20
"""Elements of one tensor that are compared by value."""
_VERSION, _IS_TRAINED = attrgetter("_version"), attrgetter("requires_grad")
_MOST_BYTES = 64 << 20
"""Greatest size of all copies together; larger containers are not cleared."""
_ITEM_BYTES = 64
"""Rough size of an item of a container."""


class Constants:
    """Notices changes by the version counters of tensors, which cost next to nothing to read.

    Changes through `tensor.data` and those of batch norm's kernels are not counted there. So values
    are compared too, in steps whose number is a power of two: often while a run is young.
    """

    def __init__(self, model: nn.Module, changing: Collection[str]) -> None:
        """Watch all parameters, and all buffers but those named in `changing`."""
        self._model = model
        self._changing = changing
        self.watch_again()

    def watch_again(self) -> None:
        """Watch the model's present tensors, some of which have been moved to other memory."""
        model = self._model
        self._ids = _ids(model)
        self._places = [p for p in tensor_places(model) if p.name not in self._changing]
        self._tensors = [place.tensor for place in self._places]
        self._homes = [place.held_in for place in self._places], [p.key for p in self._places]
        self._trained = [tensor.requires_grad for tensor in self._tensors]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._copies: list[Tensor] = []
        self.mark()

    def mark(self, step: int = -1) -> None:
        """Take the present state as the expected one, before the passes of a step."""
        self._versions = [*map(_VERSION, self._tensors)]
        by_value = step >= 0 and step & (step - 1) == 0
        # In the host's memory: a device has none to spare for them.
        places = self._places if by_value else []
        self._copies = [_part(p.tensor).to("cpu", copy=True) for p in places]

    def check(self, when: str, changed: Callable[[str], str] = changed_in_pass) -> None:
        """Make sure that nothing has changed since `mark`.

        Args:
            when: phrase that begins the message, such as `step 3`.
            changed: makes the message for a tensor, by its name, that has changed.

        Raises:
            TaskError: naming the first tensor that has.
        """
        tensors = self._tensors
        # In each step, so without generators and lambdas, which take longer than the comparisons.
        if (
            [*map(_VERSION, tensors)] != self._versions
            or [*map(_IS_TRAINED, tensors)] != self._trained
            or [*map(Tensor.data_ptr, tensors)] != self._pointers
            or not all(map(is_, tensors, map(dict.get, *self._homes)))
        ):
            self._find_changed(when, changed)
        if self._copies:
            self.check_identity(when)
        for place, copy in zip(self._places, self._copies, strict=False):
            if not same_bits(_part(place.tensor), copy.to(place.tensor.device)):
                raise TaskError(f"{when}: {changed(place.name)}")

    def check_identity(self, when: str) -> None:
        """Make sure that the model's tensors are those that it had when it was built.

        Raises:
            TaskError: naming the first that is another.
        """
        if (ids := _ids(self._model)) != self._ids:
            names = [n for n in {**self._ids, **ids} if self._ids.get(n) != ids.get(n)]
            raise TaskError(
                f"{when}: {names[0]} is another tensor than when the model was built, which nobody "
                "trains or saves; change the model's modules in build_model only"
            )

    def _find_changed(self, when: str, changed: Callable[[str], str]) -> None:
        """Raise the error of the first tensor that has changed; released ones may have moved."""
        for index, (name, tensor, held_in, key) in enumerate(self._places):
            if tensor._version != self._versions[index]:
                raise TaskError(f"{when}: {changed(name)}")
            if held_in.get(key) is not tensor:
                raise TaskError(
                    f"{when}: {name} was replaced by another tensor, which nobody trains or saves; "
                    "change it in place, in Task.after_step(model, step)"
                )
            if tensor.requires_grad != self._trained[index]:
                raise TaskError(
                    f"{when}: {name}.requires_grad was changed; what is trained is fixed when the "
                    "model is built. To train a part for some steps only, multiply its loss by 0 "
                    "in the others, and do not decay its weights"
                )
            if (
                tensor.data_ptr() != self._pointers[index]
                and self._trained[index]
                and not is_released(tensor)  # else its block's storage checks it
            ):
                raise TaskError(f"{when}: {given_other_memory(name)}")


def _ids(model: nn.Module) -> dict[str, int]:
    return {place.name: id(place.tensor) for place in tensor_places(model)}


def _part(tensor: Tensor) -> Tensor:
    # A released tensor has a shape without memory: to flatten it would allocate all of it.
    if not tensor.numel() or is_released(tensor):
        return tensor.new_empty(0)
    return tensor.detach().reshape(-1)[:_MOST_COPIED]


def check_aliases(task: Task, model: nn.Module) -> None:
    """Refuse whatever shares memory with a trainable parameter.

    Args:
        task: task, which may keep tensors too.
        model: model as the task has built it.

    Raises:
        TaskError: naming both.
    """
    homes: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and has_memory(parameter):
            homes.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    roots: dict[str, object] = {"task": task, "model": model}
    roots |= module_globals(type(task), modules_around({type(task)}))
    others = [*model.named_parameters(), *model.named_buffers(), *Walk(roots).tensors.items()]
    for path, tensor in others:
        if not has_memory(tensor) or not tensor.numel():
            continue
        for name, trained in homes.get(tensor.untyped_storage().data_ptr(), []):
            if tensor is not trained and _overlap(tensor, trained):
                remedy = (
                    f"let both be one parameter (b.weight = a.weight), or take it from {name} in "
                    "each forward pass"
                )
                if path == f"model.{name.removesuffix('_orig')}":  # as torch's old function does
                    remedy = (
                        "use torch.nn.utils.parametrizations.spectral_norm instead of "
                        "torch.nn.utils.spectral_norm"
                    )
                raise TaskError(
                    f"{path}: shares memory with the parameter {name}, whose memory moves, and "
                    f"would keep the values of the start; {remedy}"
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether tensors in the same storage have an element in common."""
    touched = torch.zeros(a.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(a, touched).fill_(True)
    return bool(_bytes_of(b, touched).any())


def _bytes_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """The part of `memory`, which has an element for each byte of a storage, of a tensor."""
    width = tensor.itemsize
    strides = [*(stride * width for stride in tensor.stride()), 1]
    return memory.as_strided([*tensor.shape, width], strides, tensor.storage_offset() * width)


class Caches:
    """Containers that passes have changed, and cached functions."""

    def __init__(self, kinds: Iterable[type], more: Iterable[str] = ()) -> None:
        """Find the cached functions of some classes and of their modules.

        Args:
            kinds: classes of the task, its datasets and its hooks.
            more: names of more modules.
        """
        self._first: dict[str, tuple[Any, Any]] = {}
        self._num_bytes = 0
        self._now: list[tuple[Any, Any]] = []
        self._functions = list(cached_functions(kinds, more))

    @property
    def paths(self) -> list[str]:
        """The paths of what `forget` clears."""
        return [*self._first, *(f"{owner.__name__}.{name}" for owner, name, _ in self._functions)]

    def note(self, containers: Mapping[str, object]) -> None:
        """Copy the content of containers, by path, unless they are known already."""
        for path, value in containers.items():
            size = _size(value)
            if path not in self._first and self._num_bytes + size <= _MOST_BYTES:
                self._num_bytes += size
                self._first[path] = value, _content(value)

    def forget(self, with_functions: bool = True) -> None:
        """Give all containers the content that they had when they were noted.

        Args:
            with_functions: whether the results of cached functions are cleared too.
        """
        self._now = [(value, _content(value)) for value, _ in self._first.values()]
        for value, content in self._first.values():
            _put(value, content)
        for owner, name, function in self._functions if with_functions else ():
            again = functools.lru_cache(**function.cache_parameters())(function.__wrapped__)
            _set(owner, name, again)

    def recall(self) -> None:
        """Undo `forget`."""
        for value, content in self._now:
            _put(value, content)
        self._now = []
        for owner, name, function in self._functions:
            _set(owner, name, function)


def cached_functions(
    kinds: Iterable[type], more: Iterable[str] = ()
) -> Iterable[tuple[Any, str, Any]]:
    """Functions of `functools.lru_cache` with what they are attributes of, and their names."""
    own = {base for kind in kinds for base in kind.__mro__}
    names = {*(base.__module__ for base in own), *more}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    owners: list[Any] = [*sorted(own, key=lambda kind: kind.__qualname__), *modules]
    for owner in owners:
        if is_library(getattr(owner, "__module__", owner.__name__)):
            continue
        for name, value in list(vars(owner).items()):
            if isinstance(value, functools._lru_cache_wrapper):
                yield owner, name, value


def _set(owner: Any, name: str, value: object) -> None:
    with suppress(AttributeError, TypeError):  # a class may refuse
        if isinstance(owner, type):
            type.__setattr__(owner, name, value)
        else:
            setattr(owner, name, value)


def _size(value: Any) -> int:
    is_array = isinstance(value, (Tensor, np.ndarray))
    return int(value.nbytes) if is_array else _ITEM_BYTES * len(value)


def _content(value: Any) -> Any:
    """A copy that `_put` takes; items are the same objects."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return dict(value) if isinstance(value, dict) else list(value)


def _put(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, (list, bytearray)):
        value[:] = content
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)
