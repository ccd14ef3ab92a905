"""What a model is called with: found by calling the task on samples of its own data."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import TrainConfig
from lockstep.data.loader import Fetcher, Request, dataset_size
from lockstep.data.random import Stream, random_key
from lockstep.engine.task import Task, own_collate
from lockstep.errors import DataError, LockstepError, TaskError
from lockstep.recipes.abilities import GivesExample

SIZES = (4, 3)
"""Samples in the two batches that are compared; torch.export takes sizes of 0 and 1 as fixed."""


@dataclass(frozen=True)
class Example:
    """Inputs of a model, for two batches of different sizes.

    Attributes:
        names: name of each argument of the model's forward method.
        first: the arguments for a batch of `SIZES[0]` samples.
        second: the arguments for a batch of `SIZES[1]` samples.
        dynamic: for each argument, the dimensions that depend on the samples.
    """

    names: tuple[str, ...]
    first: tuple[Tensor, ...]
    second: tuple[Tensor, ...]
    dynamic: tuple[tuple[int, ...], ...]

    @property
    def described(self) -> str:
        """The inputs with their shapes; a `*` stands for a size that is free."""
        return ", ".join(
            f"{name} [{', '.join(_sizes(tensor, free))}] {tensor.dtype}".replace("torch.", "")
            for name, tensor, free in zip(self.names, self.first, self.dynamic, strict=True)
        )


class _Called(BaseException):
    """Ends an evaluation at its first call of the model; tasks may catch any `Exception`."""


def find_example(task: Task, model: nn.Module, config: TrainConfig) -> Example:
    """The inputs of a model, for the first samples of the validation or else the training split.

    Which part of a batch they are, the task says in `example_input`. If it has no such method, they
    are what its `evaluate` calls the model with first.

    Args:
        task: the task.
        model: its model in evaluation mode, on the CPU.
        config: its config.

    Raises:
        DataError: there are no samples.
        TaskError: the model is not called, or with something else than tensors.
    """
    dataset, split = _dataset(task)
    size = dataset_size(dataset, split)
    if size < 1:
        raise DataError(f"dataset({split!r}): is empty; an export needs samples as inputs")
    fetcher = Fetcher(dataset, own_collate(task))
    key = random_key(config.seed, Stream.EVALUATION)
    requests = [Request(key, torch.arange(count) % size) for count in SIZES]
    batches = _calling(f"dataset({split!r})", lambda: [fetcher[one] for one in requests])
    (names, first), (_, second) = [_inputs(task, model, batch) for batch in batches]
    if [t.dim() for t in first] != [t.dim() for t in second]:
        raise TaskError(f"{type(model).__name__}: its inputs have other dimensions in each batch")
    dynamic = tuple(
        tuple(dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim])
        for a, b in zip(first, second, strict=True)
    )
    return Example(names, first, second, dynamic)


def _dataset(task: Task) -> tuple[Dataset[Any], str]:
    for split in ("val", "train"):
        dataset = _calling(f"dataset({split!r})", partial(task.dataset, split))
        if dataset is not None:
            return dataset, split
    raise DataError("dataset: is None for val and train; an export needs samples as inputs")


def _inputs(task: Task, model: nn.Module, batch: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    if isinstance(task, GivesExample):
        given = _calling("example_input", lambda: task.example_input(batch))
        return _tensors(model, given if isinstance(given, tuple) else (given,), {})
    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        called.append((args, kwargs))
        raise _Called

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        _calling("evaluate", lambda: task.evaluate(model, batch))
    except _Called:
        pass
    finally:
        handle.remove()
    if not called:
        raise TaskError(
            f"{type(task).__name__}.evaluate: does not call the model itself; write "
            "`def example_input(self, batch)` that returns what its forward method takes"
        )
    return _tensors(model, *called[0])


def _tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The names and values of the arguments, in order, without those that have their defaults.

    Raises:
        TaskError: one cannot be given by position, or is no tensor.
    """
    kind = type(model).__name__
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TaskError(f"{kind}.forward: cannot take what it is given: {error}") from None
    given = {
        name: value
        for name, value in bound.arguments.items()
        if value is not signature.parameters[name].default
    }
    if bound.kwargs:
        raise TaskError(
            f"{kind}.forward: is called with keyword arguments ({', '.join(bound.kwargs)}), which "
            "cannot be given by position; export a module whose forward takes them so"
        )
    if [*given] != [*bound.arguments][: len(given)]:
        raise TaskError(
            f"{kind}.forward: is called with {', '.join(given)} only, where arguments before the "
            "last one have their defaults; put those with defaults last"
        )
    names, values = [], []
    for name, value in given.items():
        many = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        for index, part in enumerate(value if many else (value,)):
            names.append(f"{name}_{index}" if many else name)
            values.append(part)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise TaskError(
                f"{kind}.forward: its argument {name} is a {type(value).__name__}; a model whose "
                "arguments are tensors can be exported"
            )
    return tuple(names), tuple(value.detach().clone() for value in values)


def _calling(what: str, call: Any) -> Any:
    """What the task's code gives.

    Raises:
        TaskError: it raised something.
    """
    try:
        with torch.no_grad():
            return call()
    except LockstepError:
        raise
    except Exception as error:
        raise TaskError(f"{what}: raised {type(error).__name__}: {error}") from error


def _sizes(tensor: Tensor, free: tuple[int, ...]) -> list[str]:
    return ["*" if dim in free else str(size) for dim, size in enumerate(tensor.shape)]
