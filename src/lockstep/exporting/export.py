"""`lockstep.export`: a run's model in a file that other programs read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.data.random import kept_generators
from lockstep.engine.step.flat import model_digest
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError
from lockstep.exporting.example import Example, find_example
from lockstep.exporting.formats import GRAPHS, outputs, read_weights, silent, write_weights
from lockstep.files import temporary_beside
from lockstep.loading import Loaded, load
from lockstep.parsing import shown

WEIGHTS = "safetensors"

SUFFIXES = {WEIGHTS: ".safetensors", **{name: graph.suffix for name, graph in GRAPHS.items()}}
"""The suffix of each format's files."""

_TOLERANCE = 1e-4
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Attributes:
        path: path of the file.
        format: name of its format.
        inputs: the inputs with their shapes, `*` for sizes that are free; empty for weights alone.
        max_difference: greatest absolute difference between an output of the model and of what was
            read back, for samples of the task's data; 0 for weights, which are the same bits.
        step: how many optimizer steps the model has seen.
    """

    path: Path
    format: str
    inputs: str
    max_difference: float
    step: int

    @property
    def described(self) -> str:
        """What was written, in one line."""
        if not self.inputs:
            return f"wrote {self.path}: weights of step {self.step}, read back with the same bits"
        return (
            f"wrote {self.path}: {self.format} of step {self.step}, inputs {self.inputs}; read "
            f"back, it differs by at most {self.max_difference:.3g}"
        )


def export(
    run_dir: str | Path,
    path: str | Path,
    *,
    format: str | None = None,
    which: str | int = "latest",
    task: type[Task] | None = None,
) -> Exported:
    """Write a run's model for programs without Lockstep; it is read back and compared.

    Formats are `safetensors` (parameters and buffers by name), `torch.export`, `torchscript` and
    `onnx` (the computation too, for batches of any size). These need a few samples of the task's
    data, to call the model with. The task's code is imported, as `load` does.

    Args:
        run_dir: of the run.
        path: path of the file; replaced as a whole if it is there.
        format: name of the format; by default, the one that the suffix of `path` says
            (`.safetensors`, `.pt2`, `.ts`, `.onnx`).
        which: `best`, `latest`, or a step's number.
        task: class of the run's task, for a run that was started in a notebook.

    Raises:
        LockstepError: there is no such run or checkpoint, the model cannot be written in this
            format, or what was read back predicts something else.
    """
    path = Path(path)
    chosen = choose_format(path, format)
    loaded = load(run_dir, which, task=task)
    with kept_generators():
        if chosen == WEIGHTS:
            _written(path, chosen, lambda there: _export_weights(loaded, there))
            return Exported(path, chosen, "", 0.0, loaded.step)
        model = loaded.model.requires_grad_(False)
        example = find_example(loaded.task, model, loaded.config)
        gap = _written(path, chosen, lambda there: _export_graph(loaded, chosen, example, there))
    return Exported(path, chosen, example.described, gap, loaded.step)


def choose_format(path: Path, format: str | None) -> str:
    """The format that is asked for, or that a path's suffix says.

    Raises:
        ConfigError: there is no such format, or what it needs is not installed.
    """
    if format is not None and format not in SUFFIXES:
        raise ConfigError(f"format={shown(format)}: must be one of {', '.join(SUFFIXES)}")
    chosen = format or next((n for n, suffix in SUFFIXES.items() if path.suffix == suffix), None)
    if chosen is None:
        raise ConfigError(
            f"{path}: says no format; end it in {', '.join(SUFFIXES.values())}, or give the format"
        )
    missing = [name for name in _NEEDED if chosen == "onnx" and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format='onnx': needs {', '.join(missing)}; install it with "
            "`pip install 'lockstep-train[onnx]'`"
        )
    return chosen


def _written(path: Path, chosen: str, write: Callable[[Path], float]) -> float:
    """Have a file written under another name, then give it its own.

    Raises:
        ConfigError: it cannot be written, or the model not in this format.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or choose another")
    # The suffix stays last: torch goes by it.
    temporary = temporary_beside(path).with_suffix(SUFFIXES[chosen])
    try:
        with silent():
            gap = write(temporary)
        os.replace(temporary, path)
    except LockstepError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be written: {reason}; choose another path") from error
    except Exception as error:  # each exporter has kinds of its own
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"{path}: the model cannot be written as {chosen}: {type(error).__name__}: {reason}; "
            f"change what its forward method does, or choose another format, such as {WEIGHTS}"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return gap


def _export_weights(loaded: Loaded, path: Path) -> float:
    model = loaded.model
    write_weights(model, path, _about(loaded))
    there = read_weights(path)
    here = model.state_dict()
    if there.keys() != here.keys() or not all(_same_bits(there[n], t) for n, t in here.items()):
        raise ConfigError(f"{path}: holds other values when read back")
    return 0.0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _export_graph(loaded: Loaded, chosen: str, example: Example, path: Path) -> float:
    """Write a model with its computation; the greatest difference once it is read back."""
    graph = GRAPHS[chosen]
    with torch.no_grad():
        graph.write(loaded.model, example, _about(loaded), path)
        run = graph.read(path)
        batches = (example.first, example.second)
        return max(_gap(loaded.model, run, inputs, chosen) for inputs in batches)


def _gap(
    model: nn.Module,
    run: Callable[[tuple[Tensor, ...]], list[Tensor]],
    inputs: tuple[Tensor, ...],
    chosen: str,
) -> float:
    """The greatest difference between what the model and what its exported form return.

    Raises:
        ConfigError: it is more than rounding.
    """
    wanted, got = outputs(model(*inputs)), run(inputs)
    if [t.shape for t in wanted] != [t.shape for t in got]:
        raise ConfigError(
            f"{chosen}: what was written returns tensors of other shapes, for "
            f"{len(inputs[0])} samples; its computation must not depend on their number"
        )
    most = 0.0
    for a, b in zip(wanted, got, strict=True):
        difference = (a.double() - b.double()).abs()
        gap = float(difference.max()) if difference.numel() else 0.0
        scale = max(1.0, float(a.double().abs().max())) if a.numel() else 1.0
        if not gap <= _TOLERANCE * scale:
            raise ConfigError(
                f"{chosen}: what was written predicts something else, by up to {gap:.3g}; is there "
                "anything random in the model's forward method, or that depends on values?"
            )
        most = max(most, gap)
    return most


def _about(loaded: Loaded) -> dict[str, str]:
    """Metadata of the file, by name."""
    return {
        "task": loaded.task.name,
        "step": str(loaded.step),
        "config_hash": loaded.config.hash,
        "config": loaded.config.to_yaml(),
        "params_sha256": model_digest(loaded.model),
        "lockstep": version("lockstep-train"),
        "torch": str(torch.__version__),
    }
