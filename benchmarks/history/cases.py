"""What is measured of a revision: seconds, of which fewer are better."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.processes import Failed, Program, Result, busy_cores, measured

from lockstep.launching.job.commands import rank_environment
from lockstep.observe import read_events

_TIMEOUT_S = 300
_SMALL = 300, 2100, 5
"""Steps, warm-up and repeats of the small model.

In its first seconds each run may look for hidden state for 0.2 s in all (`guards.py`).
"""
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


def _loop(
    text: str,
    value: Callable[[Result], float],
    num_ranks: int,
    arguments: tuple[str, ...],
    script: str = "lockstep_loop.py",
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Case:
    """Something that a program measures itself.

    Args:
        text: what tables call it.
        value: takes the seconds from what the program says.
        num_ranks: number of ranks.
        arguments: of the program.
        script: the program.
        beside: what goes on meanwhile.
    """
    program = Program(text, script, arguments, "mpirun" if num_ranks > 1 else "python", num_ranks)

    def seconds(tree: Path) -> float:
        # The revision's own program: it calls what a later one may have under another name.
        own = replace(program, folder=tree / "benchmarks")
        with beside():
            return float(value(measured(own, _environment(tree))))

    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    return Case(f"{text}, {ranks}", seconds)


def _step(
    model: str, batch: int, num_ranks: int, length: tuple[int, int, int], parts: int = 1
) -> Case:
    """A step of a model; `length` is steps, warm-up and repeats."""
    text, more = f"step of {model}, batch {batch} a rank", tuple[str, ...]()
    if parts > 1:
        text, more = (
            f"{text} in {parts} microbatches",
            ("--num-microbatches", str(parts * num_ranks)),
        )
    return _loop(text, _step_s, num_ranks, _lasting(model, batch, length) + more)


def _lasting(model: str, batch: int, length: tuple[int, int, int]) -> tuple[str, ...]:
    names = ("--steps", "--warmup", "--repeats")
    times = (part for pair in zip(names, map(str, length), strict=True) for part in pair)
    return ("--model", model, "--batch", str(batch), *times)


def _step_s(result: Result) -> float:
    return float(result["step_s"])


def _stall_s(result: Result) -> float:
    return statistics.median(one["stall_s"] for one in result["checkpoints"])


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
        "step-64": _step("mlp_small", 64, 1, _SMALL),
        "step-64-2": _step("mlp_small", 64, 2, _SMALL),
        "step-1000": _step("mlp_small", 1000, 1, _SMALL),
        "step-1000-2": _step("mlp_small", 1000, 2, _SMALL),
        "halves-64": _step("mlp_small", 64, 1, _SMALL, parts=2),
        "mlp-2": _step("mlp_0p8m", 256, 2, (60, 120, 5)),
        "transformer-2": _step("transformer_27m", 8, 2, (2, 1, 3)),
        "busy-64-2": _loop(
            "step of mlp_small, batch 64 a rank, beside busy processes",
            _step_s,
            2,
            _lasting("mlp_small", 64, _SMALL),
            beside=busy_cores,
        ),
        "stall-2": _loop(
            "stall of a checkpoint of mlp_0p8m",
            _stall_s,
            2,
            (*_lasting("mlp_0p8m", 64, (100, 1, 5)), "--checkpoint-every", "100"),
        ),
        "sum-2": _loop(
            "sum of 50 MB of gradients",
            lambda result: float(result["exchange_s"]["50000000"]["shared memory"]),
            2,
            ("--sizes", "50000000"),
            script="exchange.py",
        ),
        "allreduce-2": _loop(
            "all-reduce of 16 MiB through torch.distributed",
            lambda result: float(result["latency_s"][str(1 << 24)]),
            2,
            ("--backend", "mpi4py", "--seconds", "0.2"),
            script="allreduce.py",
        ),
    }
)
"""By name."""
