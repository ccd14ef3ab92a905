"""A trained model back in Python: `lockstep.load`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.config import load as load_config
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.choice import find_snapshot
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.snapshot.fits import check_fits
from lockstep.engine.snapshot.restore import load_model
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.model import build_model
from lockstep.engine.task import Task
from lockstep.recipes.abilities import Adopts
from lockstep.targets import make_task, task_class, trusted_target


@dataclass(frozen=True)
class Loaded:
    """What a run has trained.

    Attributes:
        model: in evaluation mode, with the parameters and buffers of the checkpoint.
        task: made anew, with its own state of the checkpoint.
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
        run_dir: of the run.
        which: `best`, `latest`, or a step's number.
        device: where the model is to be.
        task: class of the run's task, for a run that was started in a notebook.

    Raises:
        LockstepError: there is no such run or checkpoint, it is damaged, or the task's code has
            changed so that the model does not fit.
    """
    directory = RunDirectory(Path(run_dir))
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
