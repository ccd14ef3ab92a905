"""Writes docs/reference/command-line.md from the parser of the `lockstep` command.

`make docs-tables` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lockstep.cli.main import app

PAGE = Path(__file__).parent / "reference" / "command-line.md"

_HEAD = """# Command line

Every command takes `-h` or `--help`. `key=value` items are explained in
[Configuration](../configuration.md#ways-to-set-a-key), exit codes in
[Launchers](../launchers.md#exit-codes).

<!-- This page is made by docs/commands.py. -->"""


def written() -> str:
    """The whole page, as the parser is now."""
    root = typer.main.get_command(app)
    return "\n".join([_HEAD, *_section(root, "lockstep")]) + "\n"


def _section(command: Any, name: str) -> Iterator[str]:
    """A command's usage, options and subcommands.

    Args:
        command: click's command or group; typer brings its own copy of click's classes.
        name: all words of the command.
    """
    inner = [command.get_command(None, word) for word in _subcommands(command)]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    # Options that print and leave are those of every program; only the rest is worth a row.
    options = [p for p in options if p.name not in ("install_completion", "show_completion")]
    usage = [name, *map(_usage, arguments), *(["[OPTIONS]"] if options else [])]
    if inner and not arguments:
        usage.append("COMMAND")
    yield from ("", f"## {name}", "", command.help.strip().replace("\n    ", "\n"), "")
    yield from ("```text", " ".join(usage), "```")
    rows = [(f"`{_usage(p)}`", p.help or "") for p in arguments]
    rows += [(", ".join(f"`{flag}`" for flag in p.opts), p.help or "") for p in options]
    if rows:
        yield from ("", "| | |", "| --- | --- |")
        yield from (f"| {flags} | {text} |" for flags, text in rows)
    for one in inner:
        yield from _section(one, f"{name} {one.name}")


def _subcommands(command: Any) -> list[str]:
    return command.list_commands(None) if hasattr(command, "list_commands") else []


def _usage(argument: Any) -> str:
    shown: str = argument.metavar or argument.name.upper()
    return shown if argument.required or shown.startswith("[") else f"[{shown}]"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
