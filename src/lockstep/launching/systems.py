"""Systems: tasks with all that is their own, found by entry points.

A package adds a system by one line of its `pyproject.toml`, in the group `lockstep.systems`:

    [project.entry-points."lockstep.systems"]
    pendulum = "pendulum.system:SYSTEM"

`SYSTEM` is a `System`. Its module is imported to list what there is, so it must import nothing that
is slow; the task and the subcommands are imported when they are first used.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from lockstep.errors import ConfigError
from lockstep.launching.rank.early import ending_at_interrupt

if TYPE_CHECKING:
    import typer
    from torch import Tensor, nn

    from lockstep.engine.task import Task
    from lockstep.launching.foreign_files import ForeignFile

_ENTRY_POINTS = "lockstep.systems"


@dataclass(frozen=True)
class CommandGroup:
    """Subcommands that a system adds to `lockstep`.

    Attributes:
        name: the word after `lockstep`.
        summary: their purpose, in one line.
        module: keeps the protocol `lockstep.launching.systems.HasCommands`.
        is_command: whether the word itself is the one subcommand that there is.
    """

    name: str
    summary: str
    module: str
    is_command: bool = False


@dataclass(frozen=True)
class System:
    """The entry of a system, known before its task is imported.

    Attributes:
        task: its Task class, as `module:class`. The class may keep the protocols below.
        summary: what it trains, in one line.
        commands: the subcommands that it adds.
        originals: module that keeps the protocol `lockstep.launching.systems.ReadsOriginals`, for
            `lockstep import`; empty if there is none.
    """

    task: str
    summary: str
    commands: CommandGroup | None = None
    originals: str = ""


@dataclass(frozen=True)
class Original:
    """What a system has found in a file or folder of the program that it follows.

    Attributes:
        recipe: name of the system.
        about: what it is, in a few words.
        lines: what it has: version, shapes, settings, metrics.
        settings: values of the recipe's config, by key.
        needs: keys that the file says nothing of, and that must be given as `key=value`.
        model: from the task, with its config, to the model with the weights that were found; None
            if there are none that fit the recipe. It needs no training data.
        tensors: weights that fit no model of the recipe, by name.
        step: optimizer steps that the weights have seen; 0 if that is unknown.
        epoch: of the next step, from 0.
        hints: lines to type next.
    """

    recipe: str
    about: str
    lines: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    model: Callable[[Any], nn.Module] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    hints: Sequence[str] = ()


class ReadsOriginals(Protocol):
    """A module that reads files of the program that a system follows; `System.originals` names it.

    It must not run anything that is in them: `lockstep.launching.foreign_files` has what it needs.
    """

    @staticmethod
    def read_original(file: ForeignFile) -> Original | None:
        """What a file or folder has; None if it is not of this system.

        Args:
            file: the file or folder.

        Raises:
            DataError: it is of this system, and damaged or of a version that cannot be read.
        """


def readers_of_originals() -> Iterator[Callable[[ForeignFile], Original | None]]:
    """The function `read_original` of each system that has one; broken systems are passed over."""
    for name in recipe_names():
        try:
            place = _system(name).originals
        except ConfigError:  # reported when the system is used by name
            continue
        if place:
            with ending_at_interrupt():
                yield cast("ReadsOriginals", importlib.import_module(place)).read_original


def recipe_names() -> list[str]:
    """The names `load_recipe` knows, sorted."""
    return sorted(_entry_points())


def command_groups() -> list[CommandGroup]:
    """The subcommands that systems add, sorted; a system that cannot be loaded adds none."""
    groups = []
    for name in recipe_names():
        try:
            system = _system(name)
        except ConfigError:  # reported when the system is used by name
            continue
        if system.commands:
            groups.append(system.commands)
    return sorted(groups, key=lambda group: group.name)


def load_recipe(name: str) -> type[Task]:
    """The Task class of a system. Only its own module is imported.

    Raises:
        ConfigError: there is no system of that name, and the message has the nearest one; or its
            task is not where the system says.
    """
    place = _system(name).task
    module, _, attribute = place.partition(":")
    try:
        with ending_at_interrupt():
            kind = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # of what the task's module imports
        kind = None
    if not isinstance(kind, type):
        raise ConfigError(f"recipe {name!r}: there is no class {place}, which its system names")
    return cast("type[Task]", kind)


def recipe_of(kind: type[Task]) -> str:
    """The name of the system that a Task class is of; empty if it is of none."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    package = kind.__module__.partition(".")[0]
    for name, entries in _entry_points().items():
        is_near = any(entry.module.partition(".")[0] == package for entry in entries)
        if is_near and _system(name).task == place:
            return name
    return ""


def summary(name: str) -> str:
    """What a system trains, in one line. Its task is not imported.

    Raises:
        ConfigError: there is no system of that name, or it cannot be loaded.
    """
    return _system(name).summary


@cache
def _entry_points() -> Mapping[str, Sequence[EntryPoint]]:
    """The different entry points of each name; more than one if packages clash."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=_ENTRY_POINTS):
        found.setdefault(entry.name, {})[entry.value] = entry
    return {name: [*entries.values()] for name, entries in found.items()}


@cache
def _system(name: str) -> System:
    entries = _entry_points().get(name, ())
    if not entries:
        nearest = difflib.get_close_matches(name, _entry_points(), n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"unknown recipe {name!r}{hint} (there are: {', '.join(recipe_names())})")
    if len(entries) > 1:
        places = " and ".join(sorted(entry.value for entry in entries))
        raise ConfigError(f"several packages have a recipe {name!r}: {places}; uninstall one")
    (entry,) = entries
    where = f"the entry point {name} = {entry.value!r} of the group {_ENTRY_POINTS!r}"
    try:
        found = entry.load()
    except Exception as error:  # the code of another package
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, System):
        raise ConfigError(
            f"{where} is a {type(found).__name__}, not a lockstep.launching.systems.System"
        )
    return found


@runtime_checkable
class Reports(Protocol):
    """A task that can report more about a trained model than its metrics."""

    def report(self, model: nn.Module, split: str, folder: Path, run_dir: Path) -> list[str]:
        """Write tables and pictures of a model.

        Args:
            model: trained model in evaluation mode.
            split: name of the split whose samples are looked at; the task has it.
            folder: folder to write to; it exists.
            run_dir: directory of the run that trained the model.

        Returns:
            Lines for people.
        """


@runtime_checkable
class Compares(Protocol):
    """A task that knows what simple models reach, for `lockstep eval --baselines`."""

    def baselines(self, model: nn.Module, split: str) -> Mapping[str, Mapping[str, float]]:
        """Metrics of simple models that have learned the training samples.

        Args:
            model: trained model in evaluation mode.
            split: name of the split that they are measured on; the task has it.

        Returns:
            Metrics by the name of each simple model. A name that ends in `(limit)` is the best that
            any model can reach. `the model` has those of `model`, if they are not what
            `Task.evaluate` gives.
        """


@runtime_checkable
class Adopts(Protocol):
    """A task whose samples are prepared with data of a trained model, such as its statistics."""

    def adopt(self, model: nn.Module) -> None:
        """Prepare samples as for this model from now on, rather than by the statistics of its data.

        Args:
            model: model with the parameters and buffers of a checkpoint.
        """


@runtime_checkable
class Exports(Protocol):
    """A task whose models can be used by other programs."""

    def export(self, state: Mapping[str, Tensor], folder: Path) -> list[str]:
        """Write a model in forms that need no Lockstep. Its training data need not be there.

        Args:
            state: the model's parameters and buffers by name.
            folder: folder to write to; it exists.

        Returns:
            Lines for people.
        """


@runtime_checkable
class Applies(Protocol):
    """A task that can have what it exported predict on the data that its config names."""

    def apply(self, model: nn.Module, folder: Path) -> list[str]:
        """Write what was exported into a folder predicts.

        Args:
            model: model that was exported, in evaluation mode, on the CPU.
            folder: folder that `export` has written to.

        Returns:
            Lines for people.
        """


@runtime_checkable
class GivesExample(Protocol):
    """A task that says which part of a batch its model is called with."""

    def example_input(self, batch: Any) -> Tensor | tuple[Tensor, ...]:
        """What the model's forward method takes, by position.

        Args:
            batch: as `Task.collate` makes it.
        """


class HasCommands(Protocol):
    """A module with subcommands of a recipe; `lockstep.launching.systems.CommandGroup` names it.

    It is imported to list them too, so its functions import what is slow themselves.

    Attributes:
        app: the subcommands.
    """

    app: typer.Typer
