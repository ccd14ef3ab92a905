"""Sudokus of 9x9 by models of equal CPU time; writes `docs/benchmarks/hrm-sudoku.md` and `.json`.

The recursive and the hierarchical model, the recursive one with a puzzle identifier and without
recursion, and a plain transformer train for equal shares of `--minutes` of CPU time, and solve
unseen puzzles on the way.
`--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import CheckpointConfig, ScheduleConfig
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.puzzles import Puzzles
from lockstep.systems.hrm.reports.rules import simple_answers
from lockstep.systems.hrm.task import Hrm
from page import Section, around, command, publish
from run import DOCS, machine

ONCE = "its network once, without recursion"
MODELS: Mapping[str, dict[str, Any]] = {
    "recursive": {},
    "recursive, with a puzzle identifier": {"puzzle_ids": True},
    ONCE: {
        "high_cycles": 1,
        "low_cycles": 1,
        "max_segments": 1,
        "eval_segments": 1,
    },
    "hierarchical": {"model": "hierarchical", "num_blocks": 1},
    "plain transformer, 6 layers": {"token_loss": "softmax"},
}
SIDE = 9
PLAIN = "plain transformer, 6 layers"
MARKS = (0.125, 0.25, 0.5, 1.0)
"""Parts of the CPU time after which the puzzles are solved."""
_LAYERS = 6


class Transformer(nn.Module):
    """Tokens [B, length] to logits [B, length, vocabulary], in one pass."""

    def __init__(self, vocabulary: int, length: int, dim: int, num_heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(
            dim, num_heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole answers at once."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens) + self.positions))
        return logits


class _Timed(ls.Task):
    """A task that counts the CPU time of its evaluations.

    Attributes:
        solving_s: CPU seconds of all evaluations so far.
    """

    scratch = ("task.solving_s",)
    solving_s = 0.0

    def evaluate(self, model: Any, batch: Any) -> ls.Loss:
        """As the task without a clock."""
        started = time.process_time()
        found = super().evaluate(model, batch)
        self.solving_s += time.process_time() - started
        return found


class _Puzzles(_Timed, Hrm):
    """`Hrm`, with the clock."""


class _WithoutSegments(Hrm):
    """The puzzles, order, optimizer and average of `Hrm`, answered in one pass by a transformer."""

    carry = ls.Task.carry
    lookups = ls.Task.lookups

    def build_model(self) -> Any:
        """A transformer of the width and heads of the others."""
        puzzles, config = self.puzzles["train"], self.config
        return Transformer(puzzles.vocabulary, puzzles.length, config.dim, config.num_heads)

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        """Cross entropy of the digits."""
        logits, labels = model(batch[0].long()), batch[1].long()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
        return ls.Loss(losses.sum(), len(labels))

    def evaluate(self, model: Any, batch: Any) -> ls.Loss:
        """Puzzles and digits that are right."""
        right = self._apply(model, batch[0].long()).argmax(-1) == batch[1]
        count = len(right)
        metrics = {
            "exact": (right.all(1).sum(), count),
            "token_accuracy": (right.float().mean(1).sum(), count),
        }
        return ls.Loss(torch.zeros(()), count, metrics)


class _Plain(_Timed, _WithoutSegments):
    """The transformer, with the clock."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45, help="of CPU time, all together")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--clues", type=int, default=65, help="digits that a puzzle begins with")
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**machine(("torch", "numpy")), "command": command("hrm_sudoku")}
    seeds = range(1, 1 + (1 if args.quick else args.seeds))
    share_s = 1.0 if args.quick else 60 * args.minutes / len(MODELS) / len(seeds)
    config = partial(configured, quick=args.quick, clues=args.clues, eval_every=50)
    found, simple = compared(MODELS, config, seeds, share_s)
    publish(
        None if args.quick else DOCS,
        "hrm-sudoku",
        "Sudokus in minutes",
        facts,
        [section(found, simple, share_s, args.clues)],
    )


def configured(
    keys: Mapping[str, Any], seed: int, quick: bool, eval_every: int, **puzzles: Any
) -> HrmConfig:
    """The same puzzles for all models of a seed; the time ends training.

    Args:
        keys: of the model.
        seed: of puzzles, weights and order.
        quick: whether a few puzzles do.
        eval_every: steps between evaluations, if not.
        puzzles: keys that say which puzzles.
    """
    return HrmConfig(
        size=SIDE, num_train=50 if quick else 4000, num_val=32 if quick else 256,
        data_seed=seed, seed=seed, dim=96, lr=1e-3, steps=1_000_000,
        eval_every=1 if quick else eval_every, eval_batch_size=256, num_microbatches=1,
        optimizer={"name": "adam_atan2", "weight_decay": 0.1},
        schedule=ScheduleConfig(name="constant", warmup_steps=50),
        # In so few steps an average of parameters would still be one of the first, random ones.
        ema=0.0, checkpoint=CheckpointConfig(every=1_000_000), **puzzles, **keys,
    )  # fmt: skip


def compared(
    models: Mapping[str, Mapping[str, Any]],
    configured: Callable[[Mapping[str, Any], int], HrmConfig],
    seeds: Iterable[int],
    share_s: float,
) -> tuple[dict[str, list[dict[str, Any]]], Mapping[str, Mapping[str, float]]]:
    """Train models from each seed on the same puzzles, for equal shares of CPU time.

    Args:
        models: keys of each model, by its name.
        configured: the config of a model's keys and a seed.
        seeds: at least one.
        share_s: CPU seconds of each training.

    Returns:
        What `trained` has found of each model from each seed, and simple answers to the puzzles of
        the last one.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for seed in seeds:
        puzzles = Hrm(configured({}, seed)).puzzles
        for name, keys in models.items():
            found[name].append(trained(name, configured(keys, seed), puzzles, share_s))
            print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found, simple_answers(puzzles["train"], puzzles["val"])


def trained(
    name: str, config: HrmConfig, puzzles: dict[str, Puzzles], share_s: float
) -> dict[str, Any]:
    """Solved puzzles, steps and CPU seconds at each mark; and the number of parameters.

    The clock begins behind the first step, and stands still in evaluations.
    """
    task = _Plain(config) if name == PLAIN else _Puzzles(config)
    task.puzzles = puzzles  # making them takes half a minute
    marks, curve, size = [share_s * mark for mark in MARKS], [], 0
    with tempfile.TemporaryDirectory() as folder:
        started = None
        for step in ls.steps(task, config, run_dir=Path(folder) / "run", quiet=True):
            now = time.process_time() - task.solving_s
            started = now if started is None else started
            while step.evaluated and len(curve) < len(marks) and now - started >= marks[len(curve)]:
                shown = {k: step.evaluated[f"val/{k}"] for k in ("exact", "token_accuracy")}
                curve.append({"cpu_s": now - started, "step": step.number, **shown})
            if len(curve) == len(marks):
                size = sum(p.numel() for p in step.model.parameters())
                break
    return {"parameters": size, "curve": curve}


def section(
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    simple: Mapping[str, Mapping[str, float]],
    share_s: float,
    clues: int,
) -> Section:
    made = Section(
        "Solved 9x9 Sudokus by CPU time",
        f"Percent of 256 unseen puzzles of {clues} clues that are solved whole after parts of "
        f"{share_s / 60:.1f} CPU minutes of training, on one thread; 4,000 puzzles with 4 "
        "augmentations each, width 96, batch 64. The median of the seeds ± the greatest distance "
        "from it. All Sudokus share one identifier.",
        (
            "",
            "parameters",
            *(f"after {share_s * mark / 60:.1f} min" for mark in MARKS),
            "digits, %",
        ),
        raw={"found": {name: list(of) for name, of in found.items()}, "simple": dict(simple)},
    )
    for name, row in simple.items():
        cells = [""] * (len(MARKS)) + [f"{100 * row['exact']:.1f}"]
        made.rows.append([name, *cells, f"{100 * row['token_accuracy']:.1f}"])
    for name, of in found.items():
        cells = [
            around([100 * one["curve"][mark]["exact"] for one in of], 1)
            for mark in range(len(MARKS))
        ]
        digits = around([100 * one["curve"][-1]["token_accuracy"] for one in of], 1)
        made.rows.append([name, f"{of[0]['parameters']:,}", *cells, digits])
    exact = {
        name: statistics.median(one["curve"][-1]["exact"] for one in of)
        for name, of in found.items()
    }
    order = "; ".join(sorted(exact, key=lambda name: -exact[name]))
    made.verdicts.append(f"- At the end, the most solved first: {order}")
    if exact[ONCE] > exact["recursive"]:
        solved = f"{100 * exact[ONCE]:.0f} % against {100 * exact['recursive']:.0f} %"
        made.verdicts.append(f"- In this time recursion loses: without it, {solved} are solved")
    return made


if __name__ == "__main__":
    main()
