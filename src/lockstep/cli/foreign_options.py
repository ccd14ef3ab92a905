"""Answers `--epochs 5`, a habit from other programs, with the item that means it: `epochs=5`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config import TrainConfig

_ALIKE = 0.8
"""How like an option of the command a name must be to be taken for that one, mistyped."""
_SIMILAR = 0.6
"""How like a config key a name must be, where all keys are known."""
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def takes_items(command: Callable[..., None]) -> bool:
    """Whether a subcommand takes `key=value` items."""
    return not {"overrides", "values"}.isdisjoint(inspect.signature(command).parameters)


class TakesItems(TyperCommand):
    """A subcommand with `key=value` items, which are expected to be written as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of any command; for an option that is a config key, the error names the item.

        Raises:
            ConfigError: there is such an option.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: some versions of typer have a copy of click, whose classes are others.
            if type(error).__name__ != "NoSuchOption":
                raise
            options = [name.lstrip("-") for p in self.get_params(ctx) for name in p.opts]
            hint = meant(str(getattr(error, "option_name", "")), given, options)
            if not hint:
                raise
            raise ConfigError(hint) from None


def meant(option: str, args: Sequence[str], options: Sequence[str]) -> str:
    """The message for an option that a subcommand does not have; empty if it is no config key.

    Args:
        option: the option as the parser names it, which of `-lr` is `-l`.
        args: the subcommand's arguments.
        options: names of its options, without dashes.
    """
    from lockstep.config import TrainConfig
    from lockstep.config.section import keys, nearest_key, plain_key

    shown, name, value = _written(option, args)
    plain = plain_key(name)
    if not plain:
        return ""
    kind = TrainConfig
    is_key = plain in keys(kind)
    if not is_key:
        if difflib.get_close_matches(name, options, n=1, cutoff=_ALIKE):
            return ""
        kind = _own_config(args) or kind
        is_key = plain in keys(kind)
    of_script = any(arg.endswith(".py") for arg in args)  # whose own keys are not known
    cutoff = _ALIKE if of_script else _SIMILAR
    key = plain if is_key else nearest_key(kind, name, cutoff)
    if key is None and not of_script:
        return ""
    if key is None:
        return f"{shown}: no such option; if it is a config key of the script: {plain}={value}"
    if _is_switch(kind, key) and value.lower() not in _BOOLEANS:
        shown, value = f"--{name}", "true"  # what stands behind it is something else
    if is_key:
        return f"{shown}: config keys are written without dashes: {key}={value}"
    return f"{shown}: no such option; did you mean the config key {key}={value}?"


def _written(option: str, args: Sequence[str]) -> tuple[str, str, str]:
    """An option as it was written, its name without dashes, and its value, or VALUE if none is."""
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        is_short = len(option) == 2 and name[:2] == option
        if not (name == option or is_short):
            continue
        if equals:
            return arg, name.lstrip("-"), value
        behind = args[position + 1] if position + 1 < len(args) else "-"
        if behind.startswith("--") or behind == "-" or "=" in behind or ".py" in behind:
            return arg, name.lstrip("-"), "VALUE"
        return f"{arg} {behind}", name.lstrip("-"), behind
    return option, option.lstrip("-"), "VALUE"


def _own_config(args: Sequence[str]) -> type[TrainConfig] | None:
    """The config class of the recipe, Task or run that is named; None where that fails.

    A script is not imported, for it may train as soon as it is.
    """
    from lockstep.engine.checkpoint.run_directory import RunDirectory
    from lockstep.launching.systems import recipe_names
    from lockstep.launching.targets import is_script, task_class, trusted_target

    for arg in args:
        with suppress(Exception):  # what is wrong with it is said once the option is right
            is_run = (Path(arg) / "run.json").is_file()
            target = trusted_target(RunDirectory(Path(arg))) if is_run else arg
            if not is_script(target) and (target in recipe_names() or ".py:" in target):
                return task_class(target).Config
    return None


def _is_switch(kind: type[TrainConfig], key: str) -> bool:
    """Whether a key outside of sections is true or false."""
    field = kind.model_fields.get(key)
    return field is not None and field.annotation is bool
