"""`lockstep doctor`: does everything that training needs work here, and if not, what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from lockstep.commands.doctor.check import Check
from lockstep.commands.doctor.checks import local_checks
from lockstep.commands.doctor.ranks import gloo_checks, gpu_checks, mpi_checks, srun_checks

__all__ = ["Check", "exit_code", "render", "run_doctor"]

_STYLES = {"ok": "green", "fail": "bold red", "skip": "dim"}


def run_doctor(
    ranks: int = 2,
    run_dir: Path | None = None,
    *,
    timeout_s: float = 120.0,
    on_check: Callable[[Check], None] | None = None,
) -> list[Check]:
    """Check this machine and this installation.

    Args:
        ranks: number of ranks to start.
        run_dir: path of the folder that runs would be written to; the current directory by default.
        timeout_s: seconds that each of the programs started may take.
        on_check: function that is called with each check as soon as it is done.
    """
    done = []
    for check in _checks(ranks, run_dir or Path.cwd(), timeout_s):
        done.append(check)
        if on_check:
            on_check(check)
    return done


def exit_code(checks: Sequence[Check]) -> int:
    """1 if any check failed."""
    return int(any(check.status == "fail" for check in checks))


def render(checks: Sequence[Check]) -> Table:
    """The checks as a table."""
    table = Table("check", "", "detail", box=None, pad_edge=False)
    for check in checks:
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\nfix: {check.fix}", style="yellow" if check.status == "fail" else "")
        table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), detail)
    return table


def _checks(ranks: int, run_dir: Path, timeout_s: float) -> Iterator[Check]:
    for look in local_checks(ranks, run_dir, os.environ):
        yield look()
    yield from mpi_checks(ranks, timeout_s)
    yield from gloo_checks(ranks, timeout_s)
    yield from srun_checks(ranks, timeout_s, os.environ)
    yield from gpu_checks(ranks, timeout_s)
