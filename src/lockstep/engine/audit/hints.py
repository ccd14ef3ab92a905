"""Hints at likely mistakes in a task, and at code that cannot use tensors in shards."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.data.loader import BatchSource
from lockstep.engine.audit.hidden_state import Walk
from lockstep.engine.audit.reachable import codes, has_memory, module_globals, modules_around
from lockstep.engine.evaluation.evaluation import eval_mode
from lockstep.engine.passes.buffers import KeptBuffers, tensor_places
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Task
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.sharded.logits import ShardedLogits
from lockstep.nn.sharded.sharded_tensor import ShardedTensor, frames_of, location

_FOREIGN = {
    "build_optimizer": ("configure_optimizers", "create_optimizer", "get_optimizer"),
    "build_model": ("configure_model", "create_model", "get_model"),
    "loss": ("training_step", "train_step", "compute_loss"),
    "evaluate": ("validation_step", "test_step", "eval_step", "validate"),
    "collate": ("collate_fn",),
    "dataset": ("train_dataloader", "val_dataloader", "test_dataloader", "get_dataset"),
    "metrics of the Loss that loss and evaluate return": ("compute_metrics",),
    "data.shuffle in the config, as Lockstep's sampler fixes which samples a step has": (
        "sampler", "batch_sampler", "train_sampler", "get_sampler",
    ),
    "build_scheduler, or schedule.name in the config": (
        "scheduler", "lr_scheduler", "configure_schedulers", "create_scheduler", "get_scheduler",
    ),
}  # fmt: skip
"""What to use here, instead of methods that other frameworks call."""
_CLOSE = 0.85

_MEAN = (1.6, 2.4)
"""Range of the sum of both halves' losses, divided by the whole's, if each is a mean."""

_COUPLED = 1e-3
"""Least relative difference of sums over two ways to halve a microbatch that is no rounding."""
_ABOVE_ROUNDING = 100
"""Least ratio of that difference to the one that another order of samples makes."""
_LEAST_SAMPLES = 4


def ignored_methods(kind: type[Task]) -> list[str]:
    """Messages about methods of a task that are never called, though their names suggest it."""
    own = list(_own_methods(kind))
    used = {name for _, function in own for code in codes(function) for name in code.co_names}
    meant = {name: instead for instead, names in _FOREIGN.items() for name in names}
    hooks = [n for n, v in vars(Task).items() if isinstance(v, FunctionType) and n[0] != "_"]
    hints = {}
    for name, _ in own:
        if name in used or name in vars(Task) or name[0] == "_":
            continue
        close = difflib.get_close_matches(name, hooks, 1, _CLOSE)
        instead = meant.get(name) or (close[0] if close else "")
        if instead or name.startswith("on_"):
            end = f"; use {instead}" if instead else ": there are no such hooks"
            hints[name] = f"{kind.__name__}.{name} is never called{end}"
    return list(hints.values())


def mean_loss(model: nn.Module, compute: Compute, loader: BatchSource) -> list[str]:
    """A message if `Loss.sum` seems to be a mean, which is then divided by the weight once more.

    Both halves of a microbatch are tried: sums add up to that of the whole, means to its double.
    """
    losses: list[tuple[float, float]] = []
    buffers = KeptBuffers(model)
    # A task need not work with batches of other sizes.
    with contextlib.suppress(Exception, SystemExit):
        for batch in loader.halved(0, 0):
            loss = compute.forward(0, 0, batch)
            losses.append((float(loss.sum.detach()), float(loss.weight)))
    buffers.restore()
    compute.lookups.fetch(None)
    if len(losses) != 3:
        return []
    (whole, weight), *halves = losses
    if not (whole and weight and math.isfinite(whole)):
        return []
    scale = sum(loss for loss, _ in halves) / whole
    grows = math.isclose(sum(w for _, w in halves), weight, rel_tol=0.2)
    if not (grows and _MEAN[0] < scale < _MEAN[1]):
        return []
    return [
        "Task.loss: Loss.sum seems to be a mean, as it is about the same for half a microbatch, "
        "and is divided by Loss.weight once more; use reduction='sum', or Loss.mean(loss, number "
        "of samples)"
    ]


def coupled_loss(model: nn.Module, compute: Compute, loader: BatchSource) -> list[str]:
    """A message if the loss of a sample seems to depend on the others of its microbatch.

    A microbatch is halved in two ways, in evaluation mode: for any loss that is a sum over samples,
    and whatever it adds for each batch, the halves of both ways add up to the same. Losses that
    draw random numbers, or batches that cannot be halved, tell nothing.
    """
    has_own_statistics = any(
        isinstance(m, _NormBase) and not m.track_running_stats for m in model.modules()
    )
    if compute.has_carry or compute.lookups.tables or has_own_statistics:
        return []
    buffers = KeptBuffers(model)
    is_coupled = False
    # A task need not work with batches of other sizes, or in evaluation mode.
    with contextlib.suppress(Exception, SystemExit), eval_mode(model):
        batch = loader.microbatch(0, 0)
        halves = torch.arange(_num_samples(batch)).tensor_split(2)
        mixed = torch.cat(halves)[::2], torch.cat(halves)[1::2]
        one, weight = _sum_of_parts(compute, batch, halves)
        other, other_weight = _sum_of_parts(compute, batch, mixed)
        if abs(other - one) > _COUPLED * abs(one) and math.isclose(weight, other_weight):
            # Two halves with their samples in another order: what rounding, or that order, makes.
            turned, _ = _sum_of_parts(compute, batch, [half.flip(0) for half in halves])
            is_coupled = abs(other - one) > _ABOVE_ROUNDING * abs(turned - one)
    buffers.restore()
    if not is_coupled:
        return []
    return [
        "Task.loss: its value depends on which samples share a microbatch, so num_microbatches "
        "changes what is learned. A loss that compares samples with one another (contrastive, "
        "ranking, redundancy) sees the whole batch if it is written as Task.outputs and "
        "Task.batch_loss: see how-to/batch-loss in the documentation"
    ]


@contextmanager
def shards_explained(model: nn.Module) -> Iterator[None]:
    """Explain an exception about a tensor in shards: where it comes from, and what to do.

    Raises:
        TaskError: instead of an exception whose text names such a tensor; or the code has replaced
            a buffer by one.
    """
    try:
        yield
        for name, value, *_ in tensor_places(model):
            if isinstance(value, ShardedTensor):
                raise TaskError(
                    f"buffer {name}: is set to features that are cut into shards (num_shards), "
                    f"other values on each rank: {value.remedy}"
                )
    except LockstepError:
        raise
    except Exception as error:
        kinds = {kind.__name__: kind for kind in (ShardedTensor, ShardedLogits)}
        kind = next((kinds[name] for name in kinds if name in str(error)), None)
        if kind is None:
            raise
        failure = f"{type(error).__name__}{location(model, frames_of(error.__traceback__))}"
        raise TaskError(
            f"{failure}: {str(error).splitlines()[0]}. It is a tensor whose features are cut into "
            f"shards (num_shards): {kind.remedy}"
        ) from error


def check_aliases(task: Task, model: nn.Module) -> None:
    """Refuse whatever shares memory with a trainable parameter, which is given other memory.

    The same object moves with it, as a tied weight does; a view would keep the initial values.

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


def _num_samples(batch: Any) -> int:
    """The samples of a batch of tensors, each with a row for each.

    Raises:
        ValueError: it is something else, or too small to be halved in two ways.
    """
    sizes = {len(leaf) if isinstance(leaf, Tensor) else 0 for leaf in tree_leaves(batch)}
    if len(sizes) != 1 or min(sizes) < _LEAST_SAMPLES:
        raise ValueError("cannot be halved")
    return sizes.pop()


def _sum_of_parts(compute: Compute, batch: Any, parts: Sequence[Tensor]) -> tuple[float, float]:
    """The losses of parts of a batch, given by their indices, and the weights, added up."""
    losses = [
        compute.steady_loss(tree_map(lambda t, part=part: t[part.to(t.device)], batch))
        for part in parts
    ]
    return sum(float(loss.sum.detach()) for loss in losses), sum(
        float(one.weight) for one in losses
    )


def _own_methods(kind: type[Task]) -> Iterator[tuple[str, FunctionType]]:
    for base in kind.__mro__:
        if issubclass(base, Task) and base is not Task:
            for name, value in vars(base).items():
                function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(function, FunctionType):
                    yield name, function
