"""Runs that lose ranks, and what they cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lockstep.cli.prove.chaos_plan import Incident
from lockstep.cli.prove.chaos_verdict import effect_of
from lockstep.engine.faults import Moment, PlannedFault, to_env
from lockstep.launching.api import Session
from lockstep.launching.rank.join import free_port
from lockstep.launching.start import rank_command, start
from lockstep.observe import read_events, read_result
from processes import HERE

STEPS = 60
MOMENTS: tuple[Moment, ...] = ("compute", "reduce", "reduced", "optimizer", "committed")
TORCHFT_JOIN_MS = 1000


def train(
    launcher: str,
    num_ranks: int,
    overrides: Sequence[str],
    faults: Sequence[PlannedFault],
    replacements: int = 0,
    tolerant: bool = True,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Train `digits`: the rows of its events, those of the faults that struck, and the SHA-256."""
    config = ("log_every=1", "checkpoint.every=100000", *overrides)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        log.touch()
        command = rank_command(launcher, num_ranks, "digits", config, replacements)
        if not tolerant:
            command = replace(command, argv=_without(command.argv, "--with-ft", "ulfm"))
        session = Session(str(run_dir), False, (), False, "digits")
        ended = start(
            command, session, 1, on_row=_ignore, on_line=_ignore, restarts=0,
            env=to_env(faults, log),
        )  # fmt: skip
        if ended.exit_code:
            sys.exit(f"{launcher} with {faults} ended with {ended.exit_code}: {ended.message}")
        rows = read_events(run_dir / "events.jsonl")
        strikes = [json.loads(line) for line in log.read_text().splitlines()]
        return rows, strikes, read_result(run_dir)["params_sha256"]


def lost(
    launcher: str, num_ranks: int, source: random.Random, kind: str = "kill"
) -> dict[str, Any]:
    """A random rank is killed, or stopped, at a random moment; times in seconds."""
    fault = PlannedFault(
        source.randrange(num_ranks),
        source.randrange(5, STEPS - 5),
        source.choice(MOMENTS) if kind == "kill" else "compute",
        "kill" if kind == "kill" else "stop",
        source.choice((0.0, source.uniform(0, 0.01))) if kind == "kill" else 0.0,
    )
    overrides = [f"steps={STEPS}", *(["hang_timeout_s=1"] if kind == "stop" else [])]
    rows, strikes, sha256 = train(launcher, num_ranks, overrides, [fault])
    effect = effect_of(Incident(fault.kind, fault.step, (fault,)), strikes, rows)
    steps = [r["seconds"] for r in rows if r["event"] == "StepDone" and r["step"] < fault.step]
    print(launcher, num_ranks, fault, effect.resumed_s, file=sys.stderr)
    return {
        "fault": asdict(fault),
        "noticed_s": effect.noticed_s,
        "regroup_s": effect.regroup_s,
        "resumed_s": effect.resumed_s,
        "step_s": sorted(steps)[len(steps) // 2],
        "sha256": sha256,
    }


def calm(tolerant: bool) -> float:
    """Median seconds of a step of two ranks that nothing happens to, with watchdogs or without."""
    overrides = ["steps=600", *([] if tolerant else ["hang_timeout_s=0"])]
    rows, _, _ = train("mpi", 2, overrides, [], tolerant=tolerant)
    return _median_step(rows)


def replaced(launcher: str) -> dict[str, float]:
    """One of two ranks is killed, and a new process comes; times in seconds."""
    rows, strikes, _ = train(launcher, 2, ["steps=1500"], [PlannedFault(1, 20)], replacements=1)
    recovered = [r for r in rows if r["event"] == "Recovered"]
    if [r["world_size"] for r in recovered] != [1, 2]:
        sys.exit(f"{launcher}: no new process has come in 1500 steps: {recovered}")
    print(launcher, "replaced", recovered[1], file=sys.stderr)
    return {
        "came_s": recovered[1]["time"] - strikes[0]["time"],
        "merged_s": recovered[1]["seconds"],
    }


def torchft(num_ranks: int, source: random.Random) -> dict[str, Any]:
    """The same with torchft: one of its replica groups is killed after a random step."""
    victim, step = source.randrange(num_ranks), source.randrange(10, STEPS - 10)
    port = free_port()
    lighthouse = [
        "torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
        "--join_timeout_ms", str(TORCHFT_JOIN_MS),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL}
        server = stack.enter_context(
            subprocess.Popen(lighthouse, stdout=subprocess.DEVNULL, **quiet)
        )
        stack.callback(server.kill)
        replicas = []
        for replica in range(num_ranks):
            argv = [sys.executable, str(HERE / "peers" / "torchft_loop.py")]
            argv += ["--replica", str(replica), "--replicas", str(num_ranks)]
            argv += ["--lighthouse", f"http://127.0.0.1:{port}", "--steps", str(STEPS)]
            argv += ["--kill-at", str(step)] if replica == victim else []
            child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **quiet)
            replicas.append(stack.enter_context(child))
            stack.callback(child.kill)
        said = [child.communicate(timeout=120)[0].splitlines() for child in replicas]
    killed = json.loads(said[victim][-1])["time"]
    survivor = next(lines for i, lines in enumerate(said) if i != victim)
    times = [json.loads(line)["time"] for line in survivor]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    resumed = max(b - a for a, b in itertools.pairwise(times) if b > killed)
    print("torchft", num_ranks, victim, step, resumed, file=sys.stderr)
    return {"resumed_s": resumed, "step_s": gaps[len(gaps) // 2]}


def interrupted(seconds: float, every_s: float) -> dict[str, Any]:
    """Two ranks whose group breaks now and then, and two whose group does not."""
    trial, _, _ = train("mpi", 2, ["steps=400"], [])
    step_s = _median_step(trial)
    steps, gap = int(seconds / step_s), int(every_s / step_s)
    faults = [
        PlannedFault(i % 2, at, "reduced", "miss")
        for i, at in enumerate(range(gap, steps - gap, gap))
    ]
    calm, _, expected = train("mpi", 2, [f"steps={steps}"], [])
    rough, strikes, found = train("mpi", 2, [f"steps={steps}"], faults)
    return {
        "faults": len(strikes),
        "calm_s": _train_seconds(calm),
        "rough_s": _train_seconds(rough),
        "equal": expected == found,
    }


def hogged(seconds: float) -> dict[str, Any]:
    """Two ranks with an impatient watchdog, and a busy process for each core."""
    with _hogs():
        trial, _, _ = train("mpi", 2, ["steps=60"], [])
        steps = 60 + int(seconds * 40 / _train_seconds(trial))  # 40 of the trial's are counted
        rows, _, _ = train("mpi", 2, [f"steps={steps}", "hang_timeout_s=1"], [])
    longest = max(r["seconds"] for r in rows if r["event"] == "StepDone")
    return {
        "seconds": _train_seconds(rows),
        "longest_step_s": longest,
        "alarms": len([r for r in rows if r["event"] == "RankLost"]),
    }


def sharded(overrides: Sequence[str]) -> float:
    """Seconds of a step of a perceptron with 0.8 million parameters on two ranks."""
    rows, _, _ = train("mpi", 2, ["steps=300", "model=mlp", "hidden=10667", *overrides], [])
    return _median_step(rows)


def _median_step(rows: list[dict[str, Any]]) -> float:
    steps = sorted(r["seconds"] for r in rows if r["event"] == "StepDone" and r["step"] > 20)
    return float(steps[len(steps) // 2])


def _train_seconds(rows: list[dict[str, Any]]) -> float:
    return float(sum(r["seconds"] for r in rows if r["event"] == "StepDone" and r["step"] > 20))


@contextlib.contextmanager
def _hogs() -> Iterator[None]:
    count = os.cpu_count() or 1
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def teardown() -> float:
    """From SIGKILL until the kernel reports the end of a process with torch in memory."""
    code = "import torch, lockstep; print('up', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.1)
        started = time.perf_counter()
        child.kill()
        child.wait()
        return time.perf_counter() - started


def _ignore(_: object) -> None:
    """Runs that are measured are not shown."""


def _without(argv: tuple[str, ...], *flags: str) -> tuple[str, ...]:
    """A command without some flags that stand side by side in it."""
    at = argv.index(flags[0])
    assert argv[at : at + len(flags)] == flags
    return (*argv[:at], *argv[at + len(flags) :])
