"""Options for sbatch that lockstep passes through, and what a site adds to every job script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from lockstep.errors import LaunchError
from lockstep.parsing import shown

_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.+))?", re.ASCII | re.DOTALL)
_DIRECTIVE = "#SBATCH"

_OWN = {
    "job-name": "the target's name", "nodes": "--nodes", "ntasks": "--ntasks-per-node",
    "ntasks-per-node": "--ntasks-per-node", "cpus-per-task": "--cpus-per-task", "time": "--time",
    "partition": "--partition", "account": "--account", "signal": "--signal-before",
    "output": "--output, beside which the log is", "chdir": "the working directory",
}  # fmt: skip
"""Options that lockstep sets, and what sets them."""

_NEVER = {
    "open-mode": "a requeued job goes on in the same log",
    "requeue": "the script requeues its job", "no-requeue": "the script requeues its job",
    "wrap": "there is a script", "parsable": "it is no option of a job script",
    "test-only": "it is no option of a job script", "wait": "it is no option of a job script",
}  # fmt: skip
"""Options that the script cannot work with, and why."""


def checked(options: Sequence[str]) -> tuple[str, ...]:
    """Options of sbatch as lines of a job script.

    Args:
        options: such as `--gpus-per-task=1` and `--exclusive`.

    Raises:
        LaunchError: one is no long option, has a control character, comes twice, or is set by
            lockstep.
    """
    lines: dict[str, str] = {}
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise LaunchError(
                f"{shown(option)}: options for sbatch are written --name=value or --name, such as "
                "--gpus-per-task=1"
            )
        name, value = match["name"], match["value"]
        if not option.isprintable():
            raise LaunchError(f"{option!r}: has a line break or another control character")
        _refuse_own(name, option)
        if name in lines:
            raise LaunchError(f"--{name}: comes twice among the options for sbatch")
        lines[name] = f"--{name}" + ("" if value is None else f"={shlex.quote(value)}")
    return tuple(lines.values())


def _refuse_own(name: str, option: str) -> None:
    """Refuse what lockstep sets, also if it is abbreviated, as sbatch would take it."""
    for own, means in _OWN.items():
        if own.startswith(name):
            raise LaunchError(f"{shown(option)}: is set by lockstep slurm: use {means}")
    for never, reason in _NEVER.items():
        if never.startswith(name):
            raise LaunchError(f"{shown(option)}: cannot be passed through: {reason}")


def split_setup(text: str, where: str) -> tuple[list[str], str]:
    """The options for sbatch in a site's lines, and the other lines.

    SLURM reads `#SBATCH` lines only above the first command, where lockstep puts them.

    Raises:
        LaunchError: the text has a control character, or an `#SBATCH` line cannot be read.
    """
    options: list[str] = []
    others: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.replace("\t", " ").isprintable():
            raise LaunchError(f"{where}, line {number}: has a control character")
        if not line.startswith(_DIRECTIVE):
            others.append(line)
            continue
        try:
            options += shlex.split(line.removeprefix(_DIRECTIVE), comments=True)
        except ValueError as error:
            raise LaunchError(f"{where}, line {number}: cannot be read: {error}") from None
    return options, "\n".join(others).strip("\n")
