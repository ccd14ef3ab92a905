"""`lockstep export`: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path

from lockstep.commands.evaluate import made
from lockstep.config import load
from lockstep.engine.checkpoint.choice import find_snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError
from lockstep.exporting.export import SUFFIXES
from lockstep.exporting.export import export as export_model
from lockstep.recipes.abilities import Exports
from lockstep.targets import make_task, task_class, trusted_target


def export(run_dir: Path, path: Path, which: str, format: str | None = None) -> list[str]:
    """Write a run's checkpoint in a format, or in the forms that its task knows.

    Args:
        run_dir: path of the run directory.
        path: path of the file to write, or of the folder for the forms that the task knows.
        which: checkpoint to export: `best`, `latest`, or a step's number.
        format: name of the format. By default, the one that the suffix of `path` says; if that
            says none, the forms that the task knows.

    Returns:
        Lines for people.

    Raises:
        LockstepError: there is no such run or checkpoint, no format is given and its task has no
            forms of its own, or the path cannot be written.
    """
    directory = RunDirectory(run_dir)
    target = trusted_target(directory)
    if format is not None or path.suffix in SUFFIXES.values():
        return [export_model(run_dir, path, format=format, which=which).described]
    kind = task_class(target)
    task = make_task(kind, load(kind.Config, run_dir / "config.yaml"))
    if not isinstance(task, Exports):
        raise ConfigError(
            f"{path}: {task.name} has no forms of its own; end it in "
            f"{', '.join(SUFFIXES.values())}, or give --format"
        )
    snapshot = find_snapshot(directory.checkpoints, which)
    return task.export(snapshot.model, made(path, "export to"))
