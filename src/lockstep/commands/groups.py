"""Groups of subcommands: what all of them have, and those that recipes add."""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep import __version__
from lockstep.launchers.rank.early import ending_at_interrupt
from lockstep.recipes import CommandGroup

if TYPE_CHECKING:
    from lockstep.recipes.abilities import HasCommands


def show_help(context: typer.Context) -> None:
    """Print a group's help where no subcommand is given, which is no error."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def show_version(is_wanted: bool) -> None:
    """Print the version and leave, for `--version`."""
    if is_wanted:
        print(f"lockstep {__version__}")
        raise typer.Exit


def contributed_command(group: CommandGroup) -> type[TyperCommand]:
    """A command that is a recipe's own; its module is imported when it is parsed or called."""

    class Contributed(TyperCommand):
        @cached_property
        def _imported(self) -> Any:
            with ending_at_interrupt():
                module = cast("HasCommands", importlib.import_module(group.module))
            return typer.main.get_command(module.app)

        # Click's initialiser assigns these, and they are not known before the import.
        params = property(lambda self: self._imported.params, lambda _self, _value: None)
        callback = property(lambda self: self._imported.callback, lambda _self, _value: None)

    return Contributed


def contributed(group: CommandGroup) -> typer.Typer:
    """A group whose module is imported when one of its subcommands is asked for."""

    class Contributed(TyperGroup):
        @cached_property
        def _imported(self) -> Any:
            with ending_at_interrupt():
                module = cast("HasCommands", importlib.import_module(group.module))
            return typer.main.get_group(module.app)

        def list_commands(self, ctx: Any) -> list[str]:
            names: list[str] = self._imported.list_commands(ctx)
            return names

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return self._imported.get_command(ctx, cmd_name)

    return typer.Typer(
        name=group.name,
        help=group.summary,
        cls=Contributed,
        callback=show_help,
        invoke_without_command=True,
    )
