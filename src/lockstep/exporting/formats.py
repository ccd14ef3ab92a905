"""The forms of a model: how each is made, and how what was made is run."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.exporting.example import SIZES, Example

Run = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Runs a model that was exported: from its arguments to its outputs, in order."""

ABOUT = "lockstep.json"
"""Name of the metadata in a `.pt2` or TorchScript file."""


@dataclass(frozen=True)
class Graph:
    """A form of a model that holds its computation too.

    It is made and tried in memory: torch may unpickle when it reads some of them, and files may
    have been written by anybody.

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
    program = torch.export.export(model, example.first, dynamic_shapes=_free(example))
    buffer = BytesIO()
    torch.export.save(program, buffer, extra_files={ABOUT: json.dumps(dict(about))})
    return buffer.getvalue()


def _run_program(data: bytes) -> Run:
    module = torch.export.load(BytesIO(data)).module()
    return lambda inputs: outputs(module(*inputs))


def _make_script(model: nn.Module, example: Example, about: Mapping[str, str]) -> bytes:
    # A trace keeps one way through the model, whatever later inputs are. Models that may take
    # another one are refused here.
    torch.export.export(model, example.first, dynamic_shapes=_free(example))
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
        dynamic_shapes=_free(example), verbose=False,
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


def _free(example: Example) -> tuple[dict[int, Any], ...]:
    """Which sizes are free, as torch.export is told."""
    batch = torch.export.Dim("batch")

    def size(tensor: Tensor, other: Tensor, dim: int) -> Any:
        is_batch = (tensor.shape[dim], other.shape[dim]) == SIZES
        return batch if is_batch else torch.export.Dim.AUTO

    return tuple(
        {dim: size(a, b, dim) for dim in dims}
        for a, b, dims in zip(example.first, example.second, example.dynamic, strict=True)
    )


@contextmanager
def silent() -> Iterator[None]:
    """Leaves out what torch's exporters print, log and warn of: of themselves, not of the model."""
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
