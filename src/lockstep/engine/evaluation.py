"""Metrics of a whole split, shared out over the ranks and exact whatever their number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.comm.transport import Transport
from lockstep.engine.audit.constants import Constants
from lockstep.engine.evaluation_batches import EvaluationBatches, evaluation_batches
from lockstep.engine.runtime import everywhere
from lockstep.engine.step.buffers import KeptBuffers
from lockstep.engine.step.microbatch import Compute
from lockstep.engine.task import Task
from lockstep.parallel.exchange import add_up
from lockstep.parallel.layout import Node, merges

Sums = dict[str, tuple[float, float]]
"""Loss and metrics of a batch by name, each as (sum, weight)."""


class Evaluation:
    """A split, cut into batches that are the leaves of a canonical tree.

    Attributes:
        num_samples: of the split; None for a stream that does not say its length.
    """

    def __init__(
        self,
        task: Task,
        split_name: str,
        dataset: Any,
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._batches = evaluation_batches(task, split_name, dataset, batch_size, device, seed)
        self.num_samples = self._batches.num_samples

    def run(self, transport: Transport, model: nn.Module, compute: Compute) -> dict[str, float]:
        """Loss and metrics, each a sum over all samples divided by its weight."""
        mine = self._batches.of_rank(transport.rank, transport.size)
        model.eval()
        try:
            sums = everywhere(transport, lambda: _computed(mine, model, compute, transport))
        finally:
            model.train()
        return _means(transport, self._batches, sums)

    def first_batch(self, transport: Transport, model: nn.Module, compute: Compute) -> Sums:
        """Loss and metrics of the first batch, each as (sum, weight); talks to nobody."""
        model.eval()
        try:
            return _computed([(0, self._batches.first())], model, compute, transport)[0]
        finally:
            model.train()


def _computed(
    batches: Iterable[tuple[int, Any]], model: nn.Module, compute: Compute, transport: Transport
) -> list[Sums]:
    """Loss and metrics of batches, each from the same parameters and buffers.

    Raises:
        TaskError: one of them changes a parameter.
    """
    # What a batch changes would depend on how many batches this rank has.
    kept = KeptBuffers(model)
    constants = Constants(model, kept.names)
    values = []
    for number, batch in batches:
        transport.pulse.beat()
        try:
            values.append(compute.evaluate(number, batch))
        finally:
            kept.restore()
        constants.check(f"evaluation of batch {number}")
    return values


def _means(transport: Transport, batches: EvaluationBatches, mine: list[Sums]) -> dict[str, float]:
    known = transport.gather_json([len(mine), *(sorted(sums) for sums in mine[:1])])
    counts = [count for count, *_ in known]
    names = next(theirs for _, *theirs in known if theirs)[0]
    rows = [[value for name in names for value in sums[name]] for sums in mine]
    width = 2 * len(names)
    own = torch.tensor(rows, dtype=torch.float64).reshape(-1)
    everyone = transport.gather_host(own, [n * width for n in counts]).view(-1, width)
    ranks = range(transport.size)
    numbers = [n for rank in ranks for n in batches.numbers(rank, transport.size, counts)]
    leaves = [row for _, row in sorted(zip(numbers, everyone, strict=True), key=lambda x: x[0])]
    plan, _ = merges([Node(i, 1) for i in range(len(leaves))], len(leaves))
    total = add_up(leaves, plan).tolist()
    return {
        name: s / w if w else float("nan")
        for name, s, w in zip(names, total[::2], total[1::2], strict=True)
    }
