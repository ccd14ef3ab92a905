"""What is measured of a revision: seconds, of which fewer are better."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.processes import Failed, Program, measured

from lockstep.launching.job.commands import rank_environment
from lockstep.observe import read_events

_TIMEOUT_S = 300
_LOCKSTEP = (sys.executable, "-m", "lockstep")


@dataclass(frozen=True)
class Case:
    """Something that takes time.

    Attributes:
        text: what tables call it.
        seconds: function of a revision's folder, which measures once; raises `Failed` where the
            revision cannot do it.
    """

    text: str
    seconds: Callable[[Path], float]


def _environment(tree: Path) -> dict[str, str]:
    """Variables with which an interpreter imports the package of a revision."""
    return {"PYTHONPATH": str(tree / "src")}


def _step(model: str, batch: int, num_ranks: int, steps: int, warmup: int) -> Case:
    arguments = ("--model", model, "--batch", str(batch), "--steps", str(steps))
    program = Program(
        model, "lockstep_loop.py", (*arguments, "--warmup", str(warmup), "--repeats", "5"),
        "mpirun" if num_ranks > 1 else "python", num_ranks,
    )  # fmt: skip
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"

    def seconds(tree: Path) -> float:
        # The revision's own loop: it calls what a later one may have under another name.
        own = replace(program, folder=tree / "benchmarks")
        return float(measured(own, _environment(tree))["step_s"])

    return Case(f"step of {model}, batch {batch} a rank, {ranks}", seconds)


def _run(tree: Path, argv: tuple[str, ...]) -> float:
    env = rank_environment(1) | _environment(tree)
    since = time.time()
    try:
        subprocess.run(argv, env=env, capture_output=True, check=True, timeout=_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise Failed(str(error)) from None
    return time.time() - since


def _help(tree: Path) -> float:
    return _run(tree, (*_LOCKSTEP, "--help"))


def _first_step(tree: Path) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        argv = (*_LOCKSTEP, "train", "digits", "-n", "2", "steps=2", "log_every=1")
        since = time.time()
        _run(tree, (*argv, "--run-dir", str(folder)))
        rows = read_events(folder / "events.jsonl")
        return float(next(row["time"] for row in rows if row["event"] == "StepDone")) - since


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "help": Case("`lockstep --help`", _help),
        "start": Case("first step of `lockstep train digits -n 2`", _first_step),
        "step-64": _step("mlp_small", 64, 1, 300, 50),
        "step-64-2": _step("mlp_small", 64, 2, 300, 50),
        "step-1000": _step("mlp_small", 1000, 1, 200, 40),
        "step-1000-2": _step("mlp_small", 1000, 2, 200, 40),
        "mlp-2": _step("mlp_0p8m", 256, 2, 60, 20),
    }
)
"""By name."""
