"""What can be trained: a recipe's name, `file.py:Task`, or a script `file.py`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from lockstep.config import TrainConfig, load, override
from lockstep.config.parsing import shown
from lockstep.engine.checkpoint.origin import settled
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.task import Task
from lockstep.engine.task_config import with_config
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.launching.rank.early import ending_at_interrupt
from lockstep.launching.systems import load_recipe

if TYPE_CHECKING:
    from lockstep.lightning.task import LightningTask


def is_script(target: str) -> bool:
    """Whether the target is a script that calls `lockstep.main` itself."""
    return target.endswith(".py")


def script_path(target: str) -> Path:
    """The file of a target like `file.py` or `file.py:Task`.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(target.rpartition(":")[0] if not is_script(target) else target)
    try:
        if path.is_file():
            return path.resolve()
    except (OSError, ValueError):  # too long, with a NUL, or not in the system's encoding
        pass
    raise ConfigError(f"{shown(str(path))[1:-1]}: there is no such file")


def absolute(target: str) -> str:
    """The target with an absolute path, so that it is found from any working directory."""
    if is_script(target):
        return str(script_path(target))
    if ".py:" in target:
        return f"{script_path(target)}:{target.rpartition(':')[2]}"
    return target


def trusted_target(directory: RunDirectory) -> str:
    """The target that a run directory names, whose code the current user may run.

    Raises:
        RunDirectoryError: the directory names none; the file lies in the directory, so its code
            has the same author; or it belongs to another user.
    """
    target = directory.identity().target
    if ".py" not in target:
        return target
    path = script_path(target)
    origin = f"{directory.path / 'run.json'}: target={shown(target)}: its code would be run"
    if path.is_relative_to(directory.path.resolve()):
        raise RunDirectoryError(
            f"{origin}, but it lies in the run directory; read it, move it elsewhere, and name "
            "that path in run.json"
        )
    owner = path.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise RunDirectoryError(
            f"{origin}, but it belongs to another user (number {owner}); read it, copy it to a "
            "file of your own, and name that path in run.json"
        )
    return target


def task_class(target: str) -> type[Task]:
    """The Task class of a target; of a script, the only one it defines or else imports.

    Raises:
        ConfigError: there is no such recipe, file or class.
    """
    if not target:
        raise ConfigError(
            "the run's task is in no file: it was started from a notebook or a program; go on "
            "there with launch(task, config, num_ranks=..., run_dir=..., resume=True), or train "
            "likewise; load(run_dir, task=...) gives its model"
        )
    if ".py" not in target:
        return load_recipe(target)
    module = _import(script_path(target))
    adapted = None if is_script(target) else _adapted(module, target.rpartition(":")[2])
    if adapted is not None:
        return adapted
    known = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task)
    }
    concrete = {name: value for name, value in known.items() if not inspect.isabstract(value)}
    tasks = {n: value for n, value in concrete.items() if value.__module__ == module.__name__}
    if is_script(target):
        tasks = tasks or concrete  # a script may import its task
        if len(tasks) != 1:
            names = ", ".join(sorted(tasks)) or "none"
            raise ConfigError(f"{target}: must define one Task class, defines {names}")
        return next(iter(tasks.values()))
    name = target.rpartition(":")[2]
    if name not in tasks:
        lacking = ", ".join(sorted(getattr(known.get(name), "__abstractmethods__", ())))
        if lacking:
            raise ConfigError(f"{target}: {name} must define {lacking}")
        raise ConfigError(
            f"{target}: no Task class {name!r}; there are: {', '.join(sorted(tasks)) or 'none'}"
        )
    return tasks[name]


def make_task(kind: type[Task], config: TrainConfig) -> Task:
    """A task with this config.

    Raises:
        TaskError: its class takes no config, and needs one.
    """
    return kind(config) if inspect.signature(kind).parameters else with_config(kind(), config)


def default_config(kind: type[Task], config_file: Path | None = None) -> TrainConfig:
    """The task's config with its defaults, or as a file says."""
    return kind.Config() if config_file is None else load(kind.Config, config_file)


def configured(
    target: str,
    overrides: Sequence[str],
    config_file: Path | None = None,
    run_dir: Path | None = None,
) -> tuple[type[Task], TrainConfig]:
    """Task class and config of a target, with overrides applied.

    Args:
        target: what is trained.
        overrides: `key=value` items.
        config_file: path of a YAML file with the config, if there is one.
        run_dir: directory of the run, which is resumed if it exists.

    Raises:
        ConfigError: the target or an override does not work.
        CheckpointError: there are no weights where the config says that the run starts from them.
    """
    kind = task_class(target)
    config = override(default_config(kind, config_file), overrides)
    if config.is_completed:
        from lockstep.lightning.target import completed

        config = completed(cast("type[LightningTask]", kind), config)
    return kind, settled(config, run_dir)


def completed_items(config: TrainConfig) -> list[str]:
    """`key=value` items for what a config has not from its class, but from a task's loaders."""
    if not config.is_completed:
        return []
    keys = ("batch_size", "eval_batch_size", "num_microbatches")
    items = [f"{key}={getattr(config, key)}" for key in keys]
    loading = ("shuffle", "drop_last", "num_workers")
    return items + [f"data.{key}={str(getattr(config.data, key)).lower()}" for key in loading]


def _adapted(module: ModuleType, name: str) -> type[Task] | None:
    """The Task class of a LightningModule of a file; None if the name is of something else."""
    kind = vars(module).get(name.partition("+")[0])
    bases = kind.__mro__ if inspect.isclass(kind) else ()
    if not any(base.__name__ == "LightningModule" for base in bases):
        return None
    from lockstep.lightning.target import task_of  # imports Lightning's metrics

    return task_of(module, name)


def _import(path: Path) -> ModuleType:
    name = f"lockstep_user_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with ending_at_interrupt():
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
