"""What looking for hidden state costs a step; writes `docs/benchmarks/guards.md` and `.json`.

Half of the blocks of steps of one run go without, so both kinds see the same machine. `--quick`
shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any
from unittest import mock

import torch

import lockstep
from lockstep.config import CheckpointConfig, OptimizerConfig
from lockstep.engine.audit.repetition import StepAudit
from lockstep.engine.step.train_step import StepResult, TrainStep
from lockstep.launching.api import Session, run
from lockstep_loop import NUM_BATCHES, Training
from page import Section, command, duration, publish
from processes import Spread
from run import DOCS, machine

_BLOCK, _WARM, _PARTS = 5, 1000, 12
"""Steps of a block, steps before the first one that counts, and parts of the run."""
_CASES = (("mlp_small", 64, 240), ("mlp_small", 1000, 120), ("mlp_0p8m", 64, 48))
"""Model, samples a step, and pairs of blocks in each part."""
_MOST = 1.01


class _Unguarded(StepAudit):
    """Looks for nothing."""

    def __init__(self) -> None:
        self.is_suspicious = False

    def begin(self, step: int) -> bool:
        return False

    def end(self) -> None:
        pass


class Blocks:
    """Times the steps of a run, and takes the guards out of every other block of them."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def measured(self, task: lockstep.Task, config: lockstep.TrainConfig) -> None:
        """Train."""
        step = TrainStep.run
        nothing = _Unguarded()

        def timed_step(
            own: TrainStep, number: int, decays: int, batches: Iterator[Any]
        ) -> StepResult:
            guard = own._audit
            if number >= _WARM and not _is_guarded(number):
                own._audit = nothing
            began = perf_counter()
            try:
                return step(own, number, decays, batches)
            finally:
                self.steps[number:] = [sum(self.steps[number:]) + perf_counter() - began]
                own._audit = guard

        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(mock.patch.object(TrainStep, "run", timed_step))
            run(task, config, Session(run_dir=folder, console=False))

    def pairs(self) -> list[tuple[list[float], list[float]]]:
        """Steps of each part of the run, with the guards and without."""
        length = (len(self.steps) - _WARM) // _PARTS
        parts = [range(n, n + length) for n in range(_WARM, len(self.steps), length)]
        found = []
        for part in parts:
            kinds: tuple[list[float], list[float]] = ([], [])
            for number in part:
                kinds[not _is_guarded(number)].append(self.steps[number])
            found.append(kinds)
        return found


def _is_guarded(number: int) -> bool:
    """Whether a step is one with the guards, in the order of Thue and Morse: 0 1 1 0 1 0 0 1.

    What falls on every 16th step, as the beginnings of epochs do, then falls on both kinds alike.
    """
    return (number // _BLOCK).bit_count() % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**machine(("torch",)), "command": command("guards")}
    section = Section(
        "One rank, one microbatch",
        f"{_BLOCK} steps with or without looking for hidden state in turn. `guards`: "
        "the difference between the median steps of both kinds. `median`: their ratio. `all`: the "
        "ratio of all steps, with those that are looked at and repeated, which may take 0.2 % of a "
        f"run's time, or 0.1 s if that is more. In parentheses: quartiles of {_PARTS} parts of a "
        "run.",
        ("model", "samples", "step without", "guards", "median", "all"),
    )
    for model, batch, pairs in _CASES:
        _measure(section, model, batch, 2 if args.quick else pairs)
    publish(None if args.quick else DOCS, "guards", "Looking for hidden state", facts, [section])


def _measure(section: Section, model: str, batch: int, num_pairs: int) -> None:
    steps = _WARM + 2 * _BLOCK * num_pairs * _PARTS
    config = lockstep.TrainConfig(
        batch_size=batch, num_microbatches=1, steps=steps, threads=1, log_every=1000,
        optimizer=OptimizerConfig(name="adam"), checkpoint=CheckpointConfig(every=steps // 4),
    )  # fmt: skip
    blocks = Blocks()
    blocks.measured(Training(model, NUM_BATCHES * batch, config), config)
    pairs = blocks.pairs()
    medians = [(statistics.median(guarded), statistics.median(bare)) for guarded, bare in pairs]
    every = sum(map(sum, (g for g, _ in pairs))) / sum(map(sum, (b for _, b in pairs)))
    found = _middle([guarded / bare for guarded, bare in medians])
    guards = _middle([guarded - bare for guarded, bare in medians])
    shown = f"{found.median:.3f} ({found.low:.3f}–{found.high:.3f})"
    without = duration(_middle([bare for _, bare in medians]))
    row = (model, f"{batch:,}", without, duration(guards), shown, f"{every:.3f}")
    section.rows.append(row)
    section.raw[f"{model} {batch}"] = {"medians": medians, "all": every}
    section.at_most(f"{model}, {batch}: median ≤ {_MOST}", shown, found.median <= _MOST)


def _middle(values: Sequence[float]) -> Spread:
    """The quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)


if __name__ == "__main__":
    main()
