"""Options for sbatch that lockstep passes through, and what a site adds to every job script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

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


class Given(NamedTuple):
    """An option for sbatch."""

    text: str
    where: str = ""
    """The file that it comes from, and the line; empty for the command line."""

    def error(self, message: str) -> LaunchError:
        """An error that says where the option comes from."""
        return LaunchError(f"{self.where}: {message}" if self.where else message)


def checked(*sources: Sequence[Given], is_sweep: bool = False) -> tuple[str, ...]:
    """Options of sbatch as lines of a job script.

    Args:
        sources: options such as `--gpus-per-task=1` and `--exclusive`, of those who give them; what
            one has given, the next may give another value.
        is_sweep: whether the job is an array whose tasks are the points of a sweep.

    Raises:
        LaunchError: one is no long option, has a control character, comes twice in a source, or is
            set by lockstep.
    """
    lines: dict[str, str] = {}
    for source in sources:
        lines |= _lines(source, is_sweep)
    return tuple(lines.values())


def _lines(source: Sequence[Given], is_sweep: bool) -> dict[str, str]:
    """The lines of one source, by the options' names."""
    lines: dict[str, str] = {}
    for given in source:
        option = given.text
        match = _OPTION.fullmatch(option)
        if match is None:
            raise given.error(
                f"{shown(option)}: options for sbatch are written --name=value or --name, such as "
                "--gpus-per-task=1"
            )
        name, value = match["name"], match["value"]
        if not option.isprintable():
            raise given.error(f"{option!r}: has a line break or another control character")
        _refuse_own(name, given, is_sweep)
        if name in lines:
            raise given.error(f"--{name}: comes twice among the options for sbatch")
        lines[name] = f"--{name}" + ("" if value is None else f"={shlex.quote(value)}")
    return lines


def _refuse_own(name: str, given: Given, is_sweep: bool) -> None:
    """Refuse what lockstep sets, also if it is abbreviated, as sbatch would take it."""
    if is_sweep and "array".startswith(name):
        raise given.error(f"--{name}: is set by lockstep sweep: use --jobs for how many at a time")
    for own, means in _OWN.items():
        if own.startswith(name):
            raise given.error(f"{shown(given.text)}: is set by lockstep slurm: use {means}")
    for never, reason in _NEVER.items():
        if never.startswith(name):
            raise given.error(f"{shown(given.text)}: cannot be passed through: {reason}")


def split_setup(text: str, where: str) -> tuple[list[Given], str]:
    """The options for sbatch in a site's lines, and the other lines.

    SLURM reads `#SBATCH` lines only above the first command, where lockstep puts them.

    Raises:
        LaunchError: the text has a control character, or an `#SBATCH` line cannot be read.
    """
    options: list[Given] = []
    others: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{where}, line {number}"
        if not line.replace("\t", " ").isprintable():
            raise LaunchError(f"{place}: has a control character")
        if not line.startswith(_DIRECTIVE):
            others.append(line)
            continue
        try:
            words = shlex.split(line.removeprefix(_DIRECTIVE), comments=True)
        except ValueError as error:
            raise LaunchError(f"{place}: cannot be read: {error}") from None
        options += [Given(word, place) for word in words]
    return options, "\n".join(others).strip("\n")
