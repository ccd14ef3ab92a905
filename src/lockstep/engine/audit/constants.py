"""Checks of what forward and backward passes must not change: parameters and constant buffers.

A pass changes them once for each microbatch of this rank, so the result would depend on the number
of ranks.

Parameters are moved to other memory than a task has given them: one flat array, or that of a shard
or slice. The same object moves with them, as a tied weight does; a view, or another parameter over
the same memory, would keep the initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from lockstep.engine.audit.hidden_state import Walk, has_memory, module_globals
from lockstep.engine.flat_tensors import given_other_memory
from lockstep.engine.passes.buffers import changed_in_pass, same_bits, tensor_places
from lockstep.engine.task import Task
from lockstep.errors import TaskError
from lockstep.nn.holding import is_released

_MOST_COPIED = 1 << 20
"""Elements of one tensor that are compared by value."""
_VERSION, _IS_TRAINED = attrgetter("_version"), attrgetter("requires_grad")


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
        self._copies = [_part(p.tensor).clone() for p in self._places] if by_value else []

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
            if not same_bits(_part(place.tensor), copy):
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
    roots: Mapping[str, object] = {"task": task, "model": model} | module_globals(type(task))
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
