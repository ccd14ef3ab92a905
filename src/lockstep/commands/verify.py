"""`lockstep verify`: prove that the result does not depend on the number of ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.commands.start import LAUNCHERS, rank_command, start
from lockstep.commands.target import absolute, configured, is_script
from lockstep.errors import ConfigError, LaunchError
from lockstep.front import Sitting
from lockstep.observe import read_result
from lockstep.train import checkpoint
from lockstep.train.flat import tensor_digest


@dataclass(frozen=True)
class Run:
    """One training of the config.

    Attributes:
        launcher: who started the ranks.
        num_ranks: how many.
        sha256: of the final parameters; empty if it failed.
        step: committed steps.
        wall_s: seconds of training.
        error: why it failed.
    """

    launcher: str
    num_ranks: int
    sha256: str
    step: int
    wall_s: float
    error: str = ""


def verify(
    target: str,
    overrides: Sequence[str],
    ranks: str,
    launchers: str,
    keep: Path | None,
    console: Console,
) -> int:
    """Train on each number of ranks under each launcher, and print a table of SHA-256s.

    Returns:
        0 if all are equal, 1 if not.

    Raises:
        LockstepError: something given does not work.
    """
    cases = list(_cases(ranks, launchers))
    if not is_script(target):
        configured(target, overrides)
    with ExitStack() as stack:
        if keep is None:
            folder = tempfile.mkdtemp(prefix="lockstep-verify-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            keep = Path(folder)
        runs = []
        for launcher, num_ranks in cases:
            with console.status(f"{target}: {num_ranks} ranks under {launcher}"):
                path = keep / f"{launcher}-{num_ranks}"
                runs.append(_run(target, overrides, launcher, num_ranks, path))
        console.print(_table(runs))
        for run in runs:
            if run.error:
                console.print(f"{run.launcher} × {run.num_ranks} failed: {run.error}", markup=False)
        if any(run.error for run in runs):
            return 1
        odd = [run for run in runs if run.sha256 != runs[0].sha256]
        if not odd:
            console.print(f"equal: {len(runs)} runs, one SHA-256", style="green")
            return 0
        console.print(f"different: {len(odd)} of {len(runs)} runs", style="red")
        console.print(_first_difference(target, overrides, (runs[0], odd[0]), keep), markup=False)
        return 1


def _cases(ranks: str, launchers: str) -> Iterator[tuple[str, int]]:
    """Launcher and number of ranks; plain python runs one rank only."""
    names = launchers.split(",")
    for name in names:
        if name not in LAUNCHERS:
            raise LaunchError(f"--launchers {name}: must be of {', '.join(LAUNCHERS)}")
    numbers = [int(n) if n.isdigit() else 0 for n in ranks.split(",")]
    if min(numbers) < 1:
        raise ConfigError(f"--ranks {ranks}: must be positive numbers, separated by commas")
    if names == ["python"] and 1 not in numbers:
        raise ConfigError(f"--ranks {ranks}: plain python runs one rank; add mpi to --launchers")
    if "python" in names:
        yield "python", 1
    for name in names:
        if name != "python":
            yield from ((name, number) for number in numbers)


def _run(
    target: str, overrides: Sequence[str], launcher: str, num_ranks: int, run_dir: Path
) -> Run:
    where = absolute(target)
    script = is_script(target)
    sitting = Sitting(str(run_dir), False, tuple(overrides) if script else (), False, where)
    threads = 1 if script else configured(target, overrides)[1].threads
    command = rank_command(launcher, num_ranks, where, overrides)
    ended = start(command, sitting, threads, on_row=_ignore, on_line=_ignore)
    if ended.exit_code:
        message = ended.message or f"exit code {ended.exit_code}"
        return Run(launcher, num_ranks, "", 0, 0.0, message)
    result = read_result(run_dir / "result.json")
    return Run(
        launcher, num_ranks, result["params_sha256"], result["step"], float(result["wall_s"])
    )


def _first_difference(
    target: str, overrides: Sequence[str], runs: tuple[Run, Run], keep: Path
) -> str:
    """Train both again with a checkpoint at each step, and compare these."""
    every = ["checkpoint.every=1", f"checkpoint.keep={max(r.step for r in runs)}"]
    roots = []
    for run in runs:
        path = keep / f"steps-{run.launcher}-{run.num_ranks}"
        again = _run(target, [*overrides, *every], run.launcher, run.num_ranks, path)
        if again.error:
            return f"could not be traced: {again.error}"
        roots.append(path / "checkpoints")
    names = " and ".join(f"{r.launcher} × {r.num_ranks}" for r in runs)
    for step in range(1, runs[0].step + 1):
        read = [checkpoint.read(r / checkpoint.folder_name(step)) for r in roots]
        first, second = (snapshot.model | snapshot.buffers for snapshot in read)
        for name, tensor in first.items():
            other = second[name]
            if tensor_digest(name, tensor) != tensor_digest(name, other):
                gap = (tensor.double() - other.double()).abs().max().item()
                return f"{names} first differ after step {step}, in {name} (by up to {gap:.3g})"
    return f"{names} agreed when they were run again: the difference comes and goes"


def _table(runs: Sequence[Run]) -> Table:
    table = Table()
    table.add_column("launcher")
    for name in ("ranks", "steps", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("SHA-256 of the final parameters", overflow="fold")
    for run in runs:
        equal = run.sha256 and run.sha256 == runs[0].sha256
        table.add_row(
            run.launcher,
            str(run.num_ranks),
            str(run.step),
            f"{run.wall_s:.2f}",
            run.sha256 or "failed",
            style="green" if equal else "red",
        )
    return table


def _ignore(_: object) -> None:
    """Runs being compared are not shown."""
