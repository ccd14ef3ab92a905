"""`lockstep export`: a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.commands.evaluate import made
from lockstep.config import load, override_data
from lockstep.engine.checkpoint.choice import find_snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError
from lockstep.exporting.export import SUFFIXES
from lockstep.exporting.export import export as export_model
from lockstep.loading import restored
from lockstep.recipes.abilities import Applies, Exports
from lockstep.targets import make_task, task_class, trusted_target


def export(
    run_dir: Path,
    path: Path,
    which: str,
    format: str | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Write a run's checkpoint in a format, or in the forms that its task knows.

    Args:
        run_dir: path of the run directory.
        path: path of the file to write, or of the folder for the forms that the task knows.
        which: checkpoint to export: `best`, `latest`, or a step's number.
        format: name of the format. By default, the one that the suffix of `path` says; if that
            says none, the forms that the task knows.
        overrides: `key=value` items for the config that name data for the exported model to predict
            on; only for a task that is able to.

    Returns:
        Lines for people.

    Raises:
        LockstepError: there is no such run or checkpoint, no format is given and its task has no
            forms of its own, data are given that it cannot predict on, the overrides are of
            another model, or the path cannot be written.
    """
    directory = RunDirectory(run_dir)
    target = trusted_target(directory)
    is_file = format is not None or path.suffix in SUFFIXES.values()
    if is_file and not overrides:
        return [export_model(run_dir, path, format=format, which=which).described]
    kind = task_class(target)
    own = load(kind.Config, run_dir / "config.yaml")
    config = override_data(own, overrides)
    # What is exported is the run's, whatever data it then predicts on.
    task = make_task(kind, own)
    applied = make_task(kind, config) if overrides else task
    if overrides and (is_file or not isinstance(applied, Applies)):
        raise ConfigError(
            f"{overrides[0]}: {f'{path}: a file' if is_file else task.name} is exported without "
            "data; leave the key out"
        )
    if not isinstance(task, Exports):
        raise ConfigError(
            f"{path}: {task.name} has no forms of its own; end it in "
            f"{', '.join(SUFFIXES.values())}, or give --format"
        )
    snapshot = find_snapshot(directory.checkpoints, which)
    if not overrides or not isinstance(applied, Applies):
        return task.export(snapshot.model, made(path, "export to"))
    # The data first: what is wrong with them is known before anything is written.
    device = torch.device("cpu")
    model = restored(applied, config, snapshot, device, str(directory.checkpoints))
    applied.data_digest()
    lines = task.export(snapshot.model, made(path, "export to"))
    return [*lines, *applied.apply(model.eval(), path)]
