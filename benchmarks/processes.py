"""Starting what is measured, one thing at a time, and reading its line of JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.launching.host.processes import usable_cores
from lockstep.launching.job.commands import (
    mpirun_command,
    python_command,
    rank_environment,
    torchrun_command,
)

HERE = Path(__file__).parent
TIMEOUT_S = 180

Result = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A script to run.

    Attributes:
        name: what tables call it.
        script: its file, below this folder.
        arguments: for it.
        launcher: what starts its ranks.
        num_ranks: how many.
        folder: folder of the script.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    launcher: Literal["python", "mpirun", "torchrun"] = "python"
    num_ranks: int = 1
    folder: Path = HERE

    def argv(self) -> Sequence[str]:
        """The command that starts it."""
        inner = [sys.executable, str(self.folder / self.script), *self.arguments]
        if self.launcher == "mpirun":
            return mpirun_command(self.num_ranks, inner, cores=usable_cores()).argv
        if self.launcher == "torchrun":
            return torchrun_command(self.num_ranks, inner).argv
        return python_command(inner).argv


class Failed(Exception):
    """A program did not end as it should; the message holds what it said."""


def measured(program: Program, environment: Mapping[str, str] | None = None) -> Result:
    """Run a program to its end, with one thread a rank.

    Args:
        program: to run.
        environment: further variables for it.

    Raises:
        Failed: it failed, or took too long.
    """
    try:
        done = subprocess.run(
            program.argv(),
            env=rank_environment(threads=1) | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {TIMEOUT_S} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise Failed(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    result: Result = json.loads(lines[-1])
    return result


def run(program: Program) -> Result:
    """Run a program, and name it while it runs.

    Raises:
        SystemExit: it failed.
    """
    print(f"  {program.name}", end="", file=sys.stderr, flush=True)
    try:
        return measured(program)
    except Failed as error:
        sys.exit(f"\n{program.name}: {error}")


def alternate(programs: Sequence[Program], rounds: int) -> dict[str, list[Result]]:
    """Run all of them in turn, several rounds: A B C A B C …, so that drift hits all alike."""
    results: dict[str, list[Result]] = {p.name: [] for p in programs}
    for number in range(rounds):
        print(f"  round {number + 1}/{rounds}:", end="", file=sys.stderr, flush=True)
        for program in programs:
            results[program.name].append(run(program))
        print(file=sys.stderr)
    return results


@dataclass(frozen=True)
class Spread:
    """The median of several measurements, and the least and greatest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Spread:
        """Of ratios, taken round by round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])


@contextmanager
def busy_cores() -> Iterator[None]:
    """Has a process compute on each core, wherever the system puts it."""
    with ExitStack() as stack:
        for _ in range(usable_cores()):
            argv = [sys.executable, "-c", "while True: pass"]
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
        yield
