"""LightningModules as what `lockstep train` and programs train."""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, Field, create_model

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.config.reading import build
from lockstep.config.section import Section
from lockstep.errors import ConfigError, TaskError
from lockstep.lightning.data import Source, overrides
from lockstep.lightning.task import LightningTask

_SCALARS = (bool, int, float, str)


class Arguments(Section):
    """Arguments of the `__init__` of a LightningModule or of a LightningDataModule."""

    model_config = ConfigDict(protected_namespaces=())


class LightningConfig(TrainConfig):
    """Keys of a task that is a LightningModule: its loaders bring defaults for some of them."""

    is_completed = True
    module: Arguments = Arguments()
    datamodule: Arguments = Arguments()


def is_module(kind: object) -> bool:
    """Whether something is a class of LightningModules."""
    return _is_a(kind, "LightningModule")


def is_datamodule(kind: object) -> bool:
    """Whether something is a class of LightningDataModules."""
    return _is_a(kind, "LightningDataModule")


def _is_a(kind: object, name: str) -> bool:
    """Whether something is a class of Lightning's own derived, without importing Lightning."""
    return isinstance(kind, type) and any(
        base.__name__ == name and base.__module__.startswith(("lightning.", "pytorch_lightning."))
        for base in kind.__mro__[1:]
    )


def task_of(module: ModuleType, name: str) -> type[LightningTask] | None:
    """The Task class of a LightningModule of a file; None if the name is of something else.

    Args:
        module: the file's module.
        name: name of a LightningModule, or `Module+DataModule`.

    Raises:
        ConfigError: there is no such LightningDataModule, or several and none is named.
    """
    kind_name, _, data = name.partition("+")
    kind = vars(module).get(kind_name)
    if not is_module(kind):
        return None
    datamodules = {
        n: value for n, value in vars(module).items() if is_datamodule(value) and n[:1] != "_"
    }
    if data and data not in datamodules:
        raise ConfigError(
            f"{module.__file__}:{name}: no LightningDataModule {data!r}; there are: "
            f"{', '.join(sorted(datamodules)) or 'none'}"
        )
    if not data and not overrides(kind, "train_dataloader"):
        if len(datamodules) != 1:
            raise ConfigError(
                f"{module.__file__}:{name}: has no train_dataloader, and the file has "
                + (
                    f"several LightningDataModules; name one: {kind_name}+{min(datamodules)}"
                    if datamodules
                    else "no LightningDataModule; write one of them"
                )
            )
        data = next(iter(datamodules))
    return _task_of(kind, datamodules.get(data))


@cache
def _task_of(kind: Any, data: Any) -> type[LightningTask]:
    fields: Any = {}
    for key, owner in (("module", kind), ("datamodule", data)):
        section = _arguments(owner) if owner is not None else Arguments
        fields[key] = (section, Field(default=section(), description=Arguments.__doc__))
    config = create_model(f"{kind.__name__}Config", __base__=LightningConfig, **fields)
    return _task(kind, config, _Classes(kind, data))


def _task(kind: type, config: type[TrainConfig], source: Source) -> type[LightningTask]:
    own = getattr(kind, "scratch", ())
    body = {"Config": config, "source": source, "__module__": kind.__module__}
    body["scratch"] = (*LightningTask.scratch, *own)
    return type(kind.__name__, (LightningTask,), body)


def _arguments(kind: type) -> type[Arguments]:
    """The arguments of a class that a config can hold."""
    hints: dict[str, Any] = {}
    with suppress(Exception):  # names that only type checkers know
        hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    fields: Any = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = None if parameter.default is parameter.empty else parameter.default
        if name[0] == "_" or hasattr(Section, name) or not _is_plain(default):
            continue  # keeps its default
        hint = hints.get(name, Any)
        if hint not in _SCALARS:
            hint = type(default) if type(default) in _SCALARS else Any
        if hint is int and isinstance(default, float):
            hint = float
        fields[name] = (hint | None if hint is not Any else Any, default)
    return create_model(f"{kind.__name__}Arguments", __base__=Arguments, **fields)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(v) for key, v in value.items())
    return value is None or isinstance(value, _SCALARS)


class _Classes(Source):
    """Module and data made from the classes that a target names."""

    def __init__(self, kind: type, data: type | None) -> None:
        self.kind, self._data = kind, data

    def module(self, config: TrainConfig) -> Any:
        """A new LightningModule, with the arguments of the config."""
        return _made(self.kind, "module", config)

    def datamodule(self, config: TrainConfig) -> Any:
        """A new LightningDataModule, with the arguments of the config."""
        return None if self._data is None else _made(self._data, "datamodule", config)


def _made(kind: Any, key: str, config: TrainConfig) -> Any:
    values = getattr(config, key)
    arguments = {name: getattr(values, name) for name in type(values).model_fields}
    for name, parameter in inspect.signature(kind).parameters.items():
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_named and parameter.default is parameter.empty and arguments.get(name) is None:
            raise ConfigError(
                f"{key}.{name}: is missing; {kind.__name__}.__init__ needs it: {key}.{name}=…"
            )
    return kind(**arguments)


def completed(task: type[LightningTask], config: TrainConfig) -> TrainConfig:
    """A config with what the loaders bring, where no other values were given.

    Raises:
        ConfigError: a key is given that the module's own code decides.
        TaskError: module or loaders cannot be used.
    """
    keys_given = config.model_dump(exclude_unset=True)
    if overrides(task.source.kind, "configure_optimizers"):
        for key, value, default in (
            ("lr", config.lr, TrainConfig().lr),
            ("optimizer", config.optimizer, TrainConfig().optimizer),
        ):
            if value != default:
                raise ConfigError(
                    f"{key}={shown(value)}: {task.__name__}.configure_optimizers makes the "
                    "optimizer; give it to the module's own arguments (module.…), if it has such"
                )
    brings = ("batch_size", "eval_batch_size")
    known = keys_given.get("data", {})
    if all(key in keys_given for key in brings) and {"shuffle", "drop_last"} <= known.keys():
        return config
    defaults = task(config).loaders.defaults
    defaults["data"] |= known
    values = defaults | keys_given | {"data": defaults["data"]}
    if "num_microbatches" not in keys_given:
        values["num_microbatches"] = min(config.num_microbatches, values["batch_size"])
    return build(type(config), values, "loaders")


class _Instances(Source):
    """Module and data that a program has made."""

    def __init__(self, module: Any, datamodule: Any, loaders: Mapping[str, Any]) -> None:
        self.kind, self.loaders = type(module), loaders
        self._module, self._datamodule = module, datamodule

    def module(self, config: TrainConfig) -> Any:
        """A copy of the LightningModule."""
        return copy.deepcopy(self._module)

    def datamodule(self, config: TrainConfig) -> Any:
        """The LightningDataModule."""
        return self._datamodule


def from_lightning(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    test_dataloaders: Any = None,
    datamodule: Any = None,
    **keys: Any,
) -> LightningTask:
    """A task from a LightningModule and its data, as `Trainer.fit` takes them.

    `lockstep.train` and `lockstep.main` train it. All ranks must make the same module: call
    `lightning.seed_everything` before.

    Args:
        module: the LightningModule; it is copied, and stays as it is.
        train_dataloaders: its `DataLoader`, of which dataset, collate function and batch size are
            used, if neither module nor datamodule has one.
        val_dataloaders: one for validations, or a list.
        test_dataloaders: one for the test after the last step, or a list.
        datamodule: a LightningDataModule, in place of loaders.
        keys: keys of `lockstep.TrainConfig`, such as `epochs=5, clip_norm=1.0`. Those of loaders
            (`batch_size`, `data`) are theirs by default.

    Raises:
        TaskError: it is no LightningModule, or has something that Lockstep cannot honour.
        ConfigError: a key is unknown or a value does not fit.
    """
    if not is_module(type(module)):
        raise TaskError(
            f"from_lightning: module is a {type(module).__name__}; must be a LightningModule"
        )
    if datamodule is not None and not is_datamodule(type(datamodule)):
        raise TaskError(
            f"from_lightning: datamodule is a {type(datamodule).__name__}; must be a "
            "LightningDataModule; loaders are train_dataloaders, val_dataloaders, test_dataloaders"
        )
    named = {"train": train_dataloaders, "val": val_dataloaders, "test": test_dataloaders}
    loaders = {split: loader for split, loader in named.items() if loader is not None}
    source = _Instances(module, datamodule, loaders)
    task = _task(type(module), LightningConfig, source)
    return task(completed(task, build(LightningConfig, keys, "from_lightning")))
