"""The formats of exported models: example inputs, and how each format is made and run."""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import TrainConfig
from lockstep.data.loader import Fetcher, Request
from lockstep.data.random import Stream, random_key
from lockstep.engine.task import Task
from lockstep.engine.task_config import own_collate
from lockstep.engine.training_data import dataset_size
from lockstep.errors import ConfigError, DataError, LockstepError, TaskError
from lockstep.launching.systems import GivesExample

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


def _calling(name: str, call: Any) -> Any:
    """The result of a call of the task's code.

    Raises:
        TaskError: the code raised an exception.
    """
    try:
        with torch.no_grad():
            return call()
    except LockstepError:
        raise
    except Exception as error:
        raise TaskError(f"{name}: raised {type(error).__name__}: {error}") from error


def _sizes(tensor: Tensor, free: tuple[int, ...]) -> list[str]:
    return ["*" if dim in free else str(size) for dim, size in enumerate(tensor.shape)]


Run = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Runs a model that was exported: from its arguments to its outputs, in order."""

ABOUT = "lockstep.json"
"""Name of the metadata in a `.pt2` or TorchScript file."""


@dataclass(frozen=True)
class Graph:
    """A format that holds the computation of a model too.

    It is made and tried in memory: reading some formats unpickles, and anybody may have written a
    file.

    Attributes:
        suffix: of its files.
        make: the content of a file, from model, inputs and metadata.
        run: runs the model in such a content.
    """

    suffix: str
    make: Callable[[nn.Module, Example, Mapping[str, str]], bytes]
    run: Callable[[bytes], Run]


def outputs(value: Any) -> list[Tensor]:
    """The tensors that a model returns, in order.

    Raises:
        ConfigError: it returns something else.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in outputs(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in outputs(part)]
    raise ConfigError(f"the model returns a {type(value).__name__}; only tensors can be exported")


def make_weights(model: nn.Module, about: Mapping[str, str]) -> bytes:
    """Parameters and buffers by name as safetensors, with metadata."""
    # Each with memory of its own: tied weights are refused otherwise.
    state = {n: t.detach().clone().contiguous() for n, t in model.state_dict().items()}
    return save(state, metadata={"format": "pt", **about})


def read_weights(data: bytes) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return load(data)


def _make_program(model: nn.Module, example: Example, about: Mapping[str, str]) -> bytes:
    program = torch.export.export(model, example.first, dynamic_shapes=_free(model, example))
    buffer = BytesIO()
    torch.export.save(program, buffer, extra_files={ABOUT: json.dumps(dict(about))})
    return buffer.getvalue()


def _run_program(data: bytes) -> Run:
    module = torch.export.load(BytesIO(data)).module()
    return lambda inputs: outputs(module(*inputs))


def _make_script(model: nn.Module, example: Example, about: Mapping[str, str]) -> bytes:
    # A trace keeps one way through the model, whatever later inputs are. Models that may take
    # another one are refused here.
    torch.export.export(model, example.first, dynamic_shapes=_free(model, example))
    script: Any = torch.jit.trace(model, example.first, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
    buffer = BytesIO()
    torch.jit.save(script, buffer, _extra_files={ABOUT: json.dumps(dict(about))})
    return buffer.getvalue()


def _run_script(data: bytes) -> Run:
    module: Any = torch.jit.load(BytesIO(data))  # type: ignore[no-untyped-call]
    return lambda inputs: outputs(module(*inputs))


def _make_onnx(model: nn.Module, example: Example, about: Mapping[str, str]) -> bytes:
    program: Any = torch.onnx.export(
        model, example.first, dynamo=True, input_names=example.names,
        dynamic_shapes=_free(model, example), verbose=False,
    )  # fmt: skip
    program.model.metadata_props.update(about)
    return bytes(program.model_proto.SerializeToString())


def _run_onnx(data: bytes) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        given = dict(zip(names, [tensor.numpy() for tensor in inputs], strict=True))
        return [torch.from_numpy(array) for array in session.run(None, given)]

    return run


def _free(model: nn.Module, example: Example) -> tuple[Any, ...]:
    """The dimensions of free size, for torch.export."""
    batch = torch.export.Dim("batch")

    def size(tensor: Tensor, other: Tensor, dim: int) -> Any:
        is_batch = (tensor.shape[dim], other.shape[dim]) == SIZES
        return batch if is_batch else torch.export.Dim.AUTO

    free = tuple(
        {dim: size(a, b, dim) for dim in dims}
        for a, b, dims in zip(example.first, example.second, example.dynamic, strict=True)
    )
    takes_any = inspect.signature(model.forward).parameters.values()
    is_in_one = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in takes_any)
    return (free,) if is_in_one else free  # such as a `Pipeline`, which takes all as a tuple


@contextmanager
def silent() -> Iterator[None]:
    """Suppress the output, logs and warnings of torch's exporters: they are not about the model."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


GRAPHS: Mapping[str, Graph] = MappingProxyType(
    {
        "torch.export": Graph(".pt2", _make_program, _run_program),
        "torchscript": Graph(".ts", _make_script, _run_script),
        "onnx": Graph(".onnx", _make_onnx, _run_onnx),
    }
)
"""These forms by name."""
