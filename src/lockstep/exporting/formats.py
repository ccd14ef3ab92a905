"""The forms of a model: how each is written, and how what was written is run again."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.exporting.example import SIZES, Example

Run = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Runs a model that was read back: from its arguments to its outputs, in order."""

ABOUT = "lockstep.json"
"""Name of the metadata in a `.pt2` or TorchScript file."""


@dataclass(frozen=True)
class Graph:
    """A form of a model that holds its computation too.

    Attributes:
        suffix: of its files.
        write: writes the model to a file: model, inputs, metadata, path.
        read: reads a file that was written for this model.
    """

    suffix: str
    write: Callable[[nn.Module, Example, Mapping[str, str], Path], None]
    read: Callable[[Path], Run]


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


def write_weights(model: nn.Module, path: Path, about: Mapping[str, str]) -> None:
    """Write parameters and buffers by name as safetensors, with metadata."""
    # Each with memory of its own: tied weights are refused otherwise.
    state = {n: t.detach().clone().contiguous() for n, t in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt", **about})


def read_weights(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return load_file(path)


def _write_program(
    model: nn.Module, example: Example, about: Mapping[str, str], path: Path
) -> None:
    program = torch.export.export(model, example.first, dynamic_shapes=_free(example))
    torch.export.save(program, path, extra_files={ABOUT: json.dumps(dict(about))})


def _read_program(path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda inputs: outputs(module(*inputs))


def _write_script(model: nn.Module, example: Example, about: Mapping[str, str], path: Path) -> None:
    # A trace keeps one way through the model, whatever later inputs are. Models that may take
    # another one are refused here.
    torch.export.export(model, example.first, dynamic_shapes=_free(example))
    script: Any = torch.jit.trace(model, example.first, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
    script.save(str(path), _extra_files={ABOUT: json.dumps(dict(about))})


def _read_script(path: Path) -> Run:
    module: Any = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return lambda inputs: outputs(module(*inputs))


def _write_onnx(model: nn.Module, example: Example, about: Mapping[str, str], path: Path) -> None:
    program: Any = torch.onnx.export(
        model, example.first, dynamo=True, input_names=example.names,
        dynamic_shapes=_free(example), verbose=False,
    )  # fmt: skip
    program.model.metadata_props.update(about)
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        # Inputs that the model does not use are no inputs of the file.
        arrays = [tensor.numpy() for tensor in inputs]
        given = dict(zip(names, arrays, strict=True))
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


GRAPHS: Mapping[str, Graph] = {
    "torch.export": Graph(".pt2", _write_program, _read_program),
    "torchscript": Graph(".ts", _write_script, _read_script),
    "onnx": Graph(".onnx", _write_onnx, _read_onnx),
}
"""These forms by name."""
