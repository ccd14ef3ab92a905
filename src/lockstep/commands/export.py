"""`lockstep export`: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path

from lockstep.commands.evaluate import made
from lockstep.config import load
from lockstep.engine.checkpoint.choice import find_snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError
from lockstep.recipes.abilities import Exports
from lockstep.targets import make_task, task_class, trusted_target


def export(run_dir: Path, folder: Path, which: str) -> list[str]:
    """Write a run's checkpoint in the forms that its task knows.

    Args:
        run_dir: path of the run directory.
        folder: path of the folder to write to; created if it is not there.
        which: checkpoint to export: `best`, `latest`, or a step's number.

    Returns:
        Lines for people.

    Raises:
        LockstepError: there is no such run or checkpoint, its task exports nothing, or the folder
            cannot be written.
    """
    directory = RunDirectory(run_dir)
    kind = task_class(trusted_target(directory))
    task = make_task(kind, load(kind.Config, run_dir / "config.yaml"))
    if not isinstance(task, Exports):
        raise ConfigError(f"{run_dir}: {task.name} has nothing to export")
    snapshot = find_snapshot(directory.checkpoints, which)
    return task.export(snapshot.model, made(folder, "export to"))
