"""LightningModules as what `lockstep train` and programs train."""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

from pydantic import ConfigDict, Field, create_model

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.config.reading import build
from lockstep.config.section import Section
from lockstep.data.random import kept_generators
from lockstep.errors import ConfigError, TaskError
from lockstep.lightning.data import Source, overrides
from lockstep.lightning.task import LightningTask

_SCALARS = (bool, int, float, str)
_OF_LIGHTNING = ("lightning.", "pytorch_lightning.")
_LEAVE_OUT = "leave it out, or stop by after_evaluation of a lockstep.Hook"
_FOLDER = "leave it out: checkpoints are below RUN_DIR/checkpoints"
_KEPT = "leave it out: the best checkpoint is kept, and the newest, as many as checkpoint.keep says"
_CALLBACKS: Mapping[str, Mapping[str, tuple[tuple[Any, ...], str]]] = MappingProxyType(
    {
        "EarlyStopping": {
            "stopping_threshold": ((None,), _LEAVE_OUT),
            "divergence_threshold": ((None,), _LEAVE_OUT),
        },
        "ModelCheckpoint": {
            "dirpath": ((None,), _FOLDER),
            "filename": ((None,), _FOLDER),
            "save_top_k": ((1,), _KEPT),
            "_every_n_epochs": ((0, 1), "leave it out, and set eval_every in the config"),
            "_train_time_interval": ((None,), "leave it out, or set checkpoint.keep_every_s"),
        },
        "LearningRateMonitor": {},
    }
)
"""Callbacks of Lightning's own that config keys stand for, and arguments that none does: their
usual values, and what to do about others."""


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
        base.__name__ == name and base.__module__.startswith(_OF_LIGHTNING)
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
    """A config with what loaders and callbacks bring, where no other values were given.

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
    known = keys_given.keys() | keys_given.get("data", {}).keys()
    is_whole = {"batch_size", "eval_batch_size", "shuffle", "drop_last"} <= known
    if is_whole and not overrides(task.source.kind, "configure_callbacks"):
        return config
    one = task(config)
    with kept_generators():
        module = one.build_model()
    wanted = callback_keys(module)
    if keys_given.get("watch", wanted.get("watch")) != wanted.get("watch"):
        wanted.pop("watch_mode", None)  # it is that of another metric
    values = one.loaders.defaults | wanted
    for key, value in keys_given.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    if "num_microbatches" not in keys_given:
        values["num_microbatches"] = min(config.num_microbatches, values["batch_size"])
    return build(type(config), values, "loaders")


def callback_keys(module: Any) -> dict[str, Any]:
    """The config keys that ask for what the callbacks of `configure_callbacks` do.

    Raises:
        TaskError: there is a callback, or an argument of one, that no key stands for.
    """
    if not overrides(module, "configure_callbacks"):
        return {}
    returned = module.configure_callbacks()
    keys: dict[str, Any] = {}
    for callback in returned if isinstance(returned, (list, tuple)) else [returned]:
        kind = type(callback)
        name = kind.__name__ if kind.__module__.startswith(_OF_LIGHTNING) else ""
        if name not in _CALLBACKS:
            raise TaskError(
                f"{type(module).__name__}.configure_callbacks: {kind.__name__} would not be called "
                f"under Lockstep, which knows {', '.join(_CALLBACKS)}; do it in "
                "on_train_batch_end, on_train_epoch_end or on_validation_epoch_end of the module, "
                "or in a lockstep.Hook"
            )
        for argument, (usual, remedy) in _CALLBACKS[name].items():
            value = getattr(callback, argument)
            if value not in usual:
                raise TaskError(f"{name}({argument.lstrip('_')}={shown(value)}): {remedy}")
        for key, value in _keys_of(name, callback).items():
            if keys.setdefault(key, value) != value:
                raise TaskError(
                    f"{type(module).__name__}.configure_callbacks: {key} is {shown(keys[key])} for "
                    f"one callback and {shown(value)} for {name}; a run watches one metric"
                )
    return keys


def _keys_of(name: str, callback: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if getattr(callback, "monitor", None):
        watched = callback.monitor.removeprefix("val/")
        keys = {"watch": watched, "watch_mode": callback.mode}
    if name == "EarlyStopping":
        patience = max(callback.patience, 1)  # 0 is the first evaluation without a better one
        keys["early_stopping"] = {"patience": patience, "min_delta": abs(callback.min_delta)}
    if name == "ModelCheckpoint" and callback._every_n_train_steps:
        keys["checkpoint"] = {"every": callback._every_n_train_steps}
    return keys


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
