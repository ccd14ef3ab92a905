"""The trained models of runs: `load` makes one here, `export` writes one for other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.config import load as load_config
from lockstep.config.files import replacing_binary
from lockstep.config.parsing import shown
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.digests import tensors_digest
from lockstep.engine.passes.buffers import same_bits
from lockstep.engine.snapshot.compatibility import check_fits, load_model
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.model import build_model
from lockstep.engine.tables.run_tables import tables_of
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError, file_errors
from lockstep.launching.api.formats import (
    GRAPHS,
    Example,
    find_example,
    make_weights,
    outputs,
    read_weights,
    silent,
)
from lockstep.launching.remote import local_copy
from lockstep.launching.systems import Adopts
from lockstep.launching.targets import make_task, task_class, trusted_target

T = TypeVar("T")

WEIGHTS = "safetensors"

FOLDER = "dcp"

SUFFIXES = {WEIGHTS: ".safetensors", **{name: graph.suffix for name, graph in GRAPHS.items()}}
"""The suffix of each format's files."""

_TOLERANCE = 1e-4
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Loaded:
    """A trained model and its task.

    Attributes:
        model: in evaluation mode, with the parameters and buffers of the checkpoint.
        task: a new one, with its own state from the checkpoint.
        config: of the run.
        step: how many optimizer steps the checkpoint has seen.
        run_dir: the run directory.
    """

    model: nn.Module
    task: Task
    config: TrainConfig
    step: int
    run_dir: Path


def load(
    run_dir: str | Path,
    which: str | int = "best",
    device: str | torch.device = "cpu",
    task: type[Task] | None = None,
) -> Loaded:
    """The model of a run's checkpoint, in this process; its data need not be there.

    The task is made from the script or recipe that the run directory names, so its code is
    imported, unless its class is given. Random generators are left as they were.

    Args:
        run_dir: of the run; a folder, or a URL such as `s3://bucket/run`.
        which: `best`, `latest`, or a step's number.
        device: where the model is to be.
        task: class of the run's task, for a run that was started in a notebook.

    Raises:
        LockstepError: there is no such run or checkpoint, it is damaged, or the task's code has
            changed so that the model does not fit.
    """
    directory = RunDirectory(local_copy(run_dir))
    kind = task or task_class(trusted_target(directory))
    config = load_config(kind.Config, directory.path / "config.yaml")
    made = make_task(kind, config)
    snapshot = find_snapshot(directory.checkpoints, str(which))
    with kept_generators():
        model = restored(made, config, snapshot, torch.device(device), str(directory.checkpoints))
    return Loaded(model.eval(), made, config, snapshot.step, directory.path)


def restored(
    task: Task, config: TrainConfig, snapshot: Snapshot, device: torch.device, where: str
) -> nn.Module:
    """A task's model with the state of a snapshot; the task gets its own state from it too.

    Args:
        task: of the run.
        config: of the run.
        snapshot: of the run.
        device: where the model is to be.
        where: what errors call the snapshot.

    Raises:
        LockstepError: the snapshot is of another model or task.
    """
    model = build_model(task, config, device)
    check_fits(snapshot, model, where)
    load_model(snapshot, model)
    TaskState(task, task.hooks()).restore(snapshot.task, snapshot.meta.get("task", {}))
    if isinstance(task, Adopts):
        task.adopt(model)
    return model


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Attributes:
        path: path of the file.
        format: name of its format.
        inputs: the inputs with their shapes, `*` for sizes that are free; empty for weights alone.
        max_difference: greatest absolute difference between outputs of the model and of the file
            for samples of the task's data; 0 for weights, which have the same bits.
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
            return f"wrote {self.path}: weights of step {self.step}"
        return (
            f"wrote {self.path}: {self.format} of step {self.step}, inputs {self.inputs}; its "
            f"outputs differ from the model's by at most {self.max_difference:.3g}"
        )


def export(
    run_dir: str | Path,
    path: str | Path,
    *,
    format: str | None = None,
    which: str | int = "latest",
    task: type[Task] | None = None,
) -> Exported:
    """Write a run's model for programs without Lockstep, compared with what it was made from.

    Formats are `safetensors` (parameters and buffers by name), `dcp` (the same as a folder of
    `torch.distributed.checkpoint`), `torch.export`, `torchscript` and `onnx` (the computation too,
    for batches of any size). These need a few samples of the task's data, to call the model with.
    The task's code is imported, as `load` does.

    Args:
        run_dir: of the run.
        path: path of the file, or of the folder; replaced as a whole if it is there.
        format: name of the format; by default, the one that the suffix of `path` says
            (`.safetensors`, `.pt2`, `.ts`, `.onnx`).
        which: `best`, `latest`, or a step's number.
        task: class of the run's task, for a run that was started in a notebook.

    Raises:
        LockstepError: there is no such run or checkpoint, the model cannot be written in this
            format, or what was made predicts something else.
    """
    path = Path(path)
    chosen = choose_format(path, format)
    loaded = load(run_dir, which, task=task)
    model = loaded.model.requires_grad_(False)
    inputs, gap = "", 0.0
    saved = file_errors(ConfigError, path, advice="choose another path")
    if chosen == FOLDER:
        with saved:
            _made(path, chosen, lambda: _folder(loaded, path))
        return Exported(path, chosen, inputs, gap, loaded.step)
    with kept_generators():
        if chosen == WEIGHTS:
            data = _made(path, chosen, lambda: _weights(loaded))
        else:
            example = find_example(loaded.task, model, loaded.config)
            inputs = example.described
            data, gap = _made(path, chosen, lambda: _graph(loaded, chosen, example))
    with saved, replacing_binary(path) as file:
        file.write(data)
    return Exported(path, chosen, inputs, gap, loaded.step)


def choose_format(path: Path, format: str | None) -> str:
    """The requested format, or else the one that the suffix of a path means.

    Raises:
        ConfigError: there is no such format, or what it needs is not installed.
    """
    known = (*SUFFIXES, FOLDER)
    if format is not None and format not in known:
        raise ConfigError(f"format={shown(format)}: must be one of {', '.join(known)}")
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


def _made(path: Path, chosen: str, make: Callable[[], T]) -> T:
    """The result of `make`, whose errors depend on the exporter.

    Raises:
        ConfigError: the model cannot be written in this format.
    """
    try:
        with silent(), torch.no_grad():
            return make()
    except (LockstepError, OSError):
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"{path}: the model cannot be written as {chosen}: {type(error).__name__}: {reason}; "
            f"change what its forward method does, or choose another format, such as {WEIGHTS}"
        ) from error


def _weights(loaded: Loaded) -> bytes:
    data = make_weights(loaded.model, _about(loaded))
    _check_same(read_weights(data), loaded.model, WEIGHTS)
    return data


def _folder(loaded: Loaded, path: Path) -> None:
    from lockstep.engine.checkpoint import dcp  # takes a while to import

    def check(made: dcp.Folder) -> None:
        _check_same(made, loaded.model, FOLDER)

    dcp.write(path, loaded.model.state_dict(), _about(loaded), check)


def _check_same(there: Mapping[str, Tensor], model: nn.Module, chosen: str) -> None:
    here = model.state_dict()
    if there.keys() != here.keys() or not all(same_bits(there[n], t) for n, t in here.items()):
        raise ConfigError(f"{chosen}: what was made holds other values; please report this")


def _graph(loaded: Loaded, chosen: str, example: Example) -> tuple[bytes, float]:
    """The content of a file with the computation, and how much its outputs differ at most."""
    graph = GRAPHS[chosen]
    data = graph.make(loaded.model, example, _about(loaded))
    run = graph.run(data)
    return data, max(_gap(loaded.model, run, i, chosen) for i in (example.first, example.second))


def _gap(
    model: nn.Module,
    run: Callable[[tuple[Tensor, ...]], list[Tensor]],
    inputs: tuple[Tensor, ...],
    chosen: str,
) -> float:
    """The greatest difference between the outputs of the model and of its exported form.

    Raises:
        ConfigError: it is more than rounding.
    """
    wanted, got = outputs(model(*inputs)), run(inputs)
    if [t.shape for t in wanted] != [t.shape for t in got]:
        raise ConfigError(
            f"{chosen}: what was made returns tensors of other shapes, for "
            f"{len(inputs[0])} samples; its computation must not depend on their number"
        )
    most = 0.0
    for a, b in zip(wanted, got, strict=True):
        difference = (a.double() - b.double()).abs()
        gap = float(difference.max()) if difference.numel() else 0.0
        scale = max(1.0, float(a.double().abs().max())) if a.numel() else 1.0
        if not gap <= _TOLERANCE * scale:
            raise ConfigError(
                f"{chosen}: what was made predicts something else, by up to {gap:.3g}; is there "
                "anything random in the model's forward method, or that depends on values?"
            )
        most = max(most, gap)
    return most


def _about(loaded: Loaded) -> dict[str, str]:
    """Metadata of the file, by name."""
    rows = {f"{name}.weight" for name in tables_of(loaded.model)}  # with a digest of their own
    parameters = {n: t for n, t in loaded.model.state_dict().items() if n not in rows}
    return {
        "task": loaded.task.name,
        "step": str(loaded.step),
        "config_hash": loaded.config.hash,
        "config": loaded.config.to_yaml(),
        "params_sha256": tensors_digest(parameters),
        "lockstep": version("lockstep-train"),
        "torch": str(torch.__version__),
    }
