"""The trainable systems that come with Lockstep: each is a module with a Task and its config."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from lockstep.engine.task import Task
from lockstep.errors import ConfigError
from lockstep.launch.rank.early import ending_at_interrupt

_RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "digits": "lockstep.recipes.digits:Digits",
        "ufs": "lockstep.recipes.ufs.task:Ufs",
        "quantum": "lockstep.recipes.quantum.task:Quantum",
    }
)


def recipe_names() -> list[str]:
    """The names `load_recipe` knows, sorted. Imports none of them."""
    return sorted(_RECIPES)


def load_recipe(name: str) -> type[Task]:
    """The Task class of a recipe. Only its own module is imported.

    Raises:
        ConfigError: there is no recipe of that name; the message has the nearest one.
    """
    if name not in _RECIPES:
        nearest = difflib.get_close_matches(name, _RECIPES, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"unknown recipe {name!r}{hint} (there are: {', '.join(recipe_names())})")
    module, _, attribute = _RECIPES[name].partition(":")
    with ending_at_interrupt():
        return cast("type[Task]", getattr(importlib.import_module(module), attribute))


def summary(name: str) -> str:
    """A description of a recipe in one line: the first of its docstring.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    return (inspect.getdoc(load_recipe(name)) or "").partition("\n")[0]
