"""What looking for hidden state costs a step; writes `docs/benchmarks/guards.md` and `.json`.

Every other block of steps of one run goes without, so both kinds see the same machine. `--quick`
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

_BLOCK, _WARM = 100, 1000
"""Steps of a block, and steps before the first one that counts."""
_CASES = (("mlp_small", 64, 150), ("mlp_small", 1000, 60), ("mlp_0p8m", 64, 25))
"""Model, samples a step, and pairs of blocks."""
_MOST = 1.01


def _nothing(*_: object, **__: object) -> None: ...


class Blocks:
    """Times the steps of a run, and takes the guards out of every other block of them."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._without = ExitStack()

    def measured(self, task: lockstep.Task, config: lockstep.TrainConfig) -> None:
        """Train."""
        step = TrainStep.run

        def timed_step(
            own: TrainStep, number: int, decays: int, batches: Iterator[Any]
        ) -> StepResult:
            if number % _BLOCK == 0 and number >= _WARM:
                self._without.close()
                if number // _BLOCK % 2:
                    self._take_out()
            began = perf_counter()
            try:
                return step(own, number, decays, batches)
            finally:
                self.steps[number:] = [sum(self.steps[number:]) + perf_counter() - began]

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(TrainStep, "run", timed_step),
        ):
            run(task, config, Session(run_dir=folder, console=False))
            self._without.close()

    def _take_out(self) -> None:
        for name in ("begin", "end", "check"):
            self._without.enter_context(mock.patch.object(StepAudit, name, _nothing))
        self._without.enter_context(mock.patch.object(StepAudit, "is_suspicious", False))

    def pairs(self) -> list[tuple[list[float], list[float]]]:
        """Steps of two blocks that follow each other, with the guards and without."""
        blocks = [self.steps[n : n + _BLOCK] for n in range(_WARM, len(self.steps), _BLOCK)]
        return list(zip(blocks[::2], blocks[1::2], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**machine(("torch",)), "command": command("guards")}
    section = Section(
        "One rank, one microbatch",
        f"Blocks of {_BLOCK} steps, with and without looking for hidden state, in turn. `guards`: "
        "the difference between the median steps of two blocks. `median`: their ratio. `all`: the "
        "ratio of all steps, with those that are looked at and repeated, which may take 0.2 % of a "
        "run's time, or 0.1 s if that is more. In parentheses are quartiles.",
        ("model", "samples", "step without", "guards", "median", "all"),
    )
    for model, batch, pairs in _CASES:
        _measure(section, model, batch, 2 if args.quick else pairs)
    publish(None if args.quick else DOCS, "guards", "Looking for hidden state", facts, [section])


def _measure(section: Section, model: str, batch: int, num_pairs: int) -> None:
    steps = _WARM + 2 * _BLOCK * num_pairs
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
