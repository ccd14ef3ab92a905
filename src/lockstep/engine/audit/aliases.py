"""Tensors that share the memory of a parameter without being it.

Parameters get other memory than a task gave them: one flat array, or that of a shard or slice. What
is the same object moves with them, as a tied weight does; a view or another parameter over the same
memory would stay behind with the values of the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lockstep.engine.audit.held_state import has_memory, module_globals, tensors_held
from lockstep.engine.task import Task
from lockstep.errors import TaskError


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
    for path, tensor in _others(model, roots):
        if not has_memory(tensor) or not tensor.numel():
            continue
        for name, trained in homes.get(tensor.untyped_storage().data_ptr(), []):
            if tensor is not trained and _overlap(tensor, trained):
                raise TaskError(
                    f"{path}: shares memory with the parameter {name}, whose memory moves, and "
                    "would keep the values of the start; let both be one parameter (b.weight = "
                    f"a.weight), or take it from {name} in each forward pass"
                )


def _others(model: nn.Module, roots: Mapping[str, object]) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    yield from tensors_held(roots).items()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether tensors in the same storage have an element in common."""
    touched = torch.zeros(a.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(a, touched).fill_(True)
    return bool(_bytes_of(b, touched).any())


def _bytes_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """Of memory with an element for each byte of a storage, those of a tensor's bytes."""
    width = tensor.itemsize
    strides = [*(stride * width for stride in tensor.stride()), 1]
    return memory.as_strided([*tensor.shape, width], strides, tensor.storage_offset() * width)
