"""The trainable systems that come with Lockstep: each is a module with a Task and its config.

This module knows of them without importing them. A recipe is imported when it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from lockstep.errors import ConfigError
from lockstep.launchers.rank.early import ending_at_interrupt

if TYPE_CHECKING:
    from lockstep.engine.task import Task


@dataclass(frozen=True)
class CommandGroup:
    """Subcommands that a recipe adds to `lockstep`.

    Attributes:
        name: the word after `lockstep`.
        summary: what they are for, in one line.
        module: keeps the protocol `lockstep.recipes.abilities.HasCommands`.
        is_command: whether the word itself is the one subcommand that there is.
    """

    name: str
    summary: str
    module: str
    is_command: bool = False


@dataclass(frozen=True)
class Recipe:
    """What is known of a recipe before it is imported.

    Attributes:
        task: its Task class, as `module:class`.
        summary: what it trains, in one line.
        commands: the subcommands that it adds.
    """

    task: str
    summary: str
    commands: CommandGroup | None = None


_RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "cifar": Recipe(
            "lockstep.recipes.cifar.task:Cifar",
            "CIFAR-10 and images of its kind, with a small residual network and augmentation.",
        ),
        "digits": Recipe(
            "lockstep.recipes.digits:Digits",
            "Handwritten digits (scikit-learn's or MNIST), with a perceptron or a small CNN.",
        ),
        "hrm": Recipe(
            "lockstep.recipes.hrm.task:Hrm",
            "Puzzles, solved in segments by a small recursive or hierarchical model.",
            CommandGroup(
                "hrm",
                "Puzzles: their data, and what to do with a trained model.",
                "lockstep.recipes.hrm.cli",
            ),
        ),
        "sketched": Recipe(
            "lockstep.recipes.sketched.task:Sketched",
            "Handwritten digits with sketched layers: a perceptron or a transformer.",
            CommandGroup(
                "sketch",
                "Convert a trained run's dense layers to sketched ones, and say what it costs.",
                "lockstep.recipes.sketched.cli",
                is_command=True,
            ),
        ),
        "ufs": Recipe(
            "lockstep.recipes.ufs.task:Ufs",
            "Sea ice from ocean and atmosphere: NetCDF in, concentration and its Jacobian out.",
            CommandGroup("data", "Write the data that recipes use.", "lockstep.recipes.ufs.cli"),
        ),
        "quantum": Recipe(
            "lockstep.recipes.quantum.task:Quantum",
            "A quantum transformer that learns sentences word by word.",
            CommandGroup(
                "quantum",
                "What to do with a trained quantum transformer.",
                "lockstep.recipes.quantum.cli",
            ),
        ),
    }
)


def recipe_names() -> list[str]:
    """The names `load_recipe` knows, sorted."""
    return sorted(_RECIPES)


def command_groups() -> list[CommandGroup]:
    """The subcommands that recipes add, sorted by name."""
    groups = [recipe.commands for recipe in _RECIPES.values() if recipe.commands]
    return sorted(groups, key=lambda group: group.name)


def load_recipe(name: str) -> type[Task]:
    """The Task class of a recipe. Only its own module is imported.

    Raises:
        ConfigError: there is no recipe of that name; the message has the nearest one.
    """
    module, _, attribute = _recipe(name).task.partition(":")
    with ending_at_interrupt():
        return cast("type[Task]", getattr(importlib.import_module(module), attribute))


def recipe_of(kind: type[Task]) -> str:
    """The name of the recipe that a Task class is; empty if it is none. Nothing is imported."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, recipe in _RECIPES.items() if recipe.task == place), "")


def summary(name: str) -> str:
    """What a recipe trains, in one line. Nothing is imported.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    return _recipe(name).summary


def _recipe(name: str) -> Recipe:
    if name not in _RECIPES:
        nearest = difflib.get_close_matches(name, _RECIPES, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"unknown recipe {name!r}{hint} (there are: {', '.join(recipe_names())})")
    return _RECIPES[name]
