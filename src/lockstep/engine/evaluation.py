"""Metrics of a whole split, shared out over the ranks and exact whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.comm.transport import Transport
from lockstep.data.loader import Fetcher, Request, dataset_size, to_device
from lockstep.data.random import Stream, random_key
from lockstep.engine.audit.constants import Constants
from lockstep.engine.runtime import everywhere
from lockstep.engine.step.buffers import KeptBuffers
from lockstep.engine.step.microbatch import Compute
from lockstep.engine.task import Task, own_collate
from lockstep.errors import DataError
from lockstep.parallel.exchange import add_up
from lockstep.parallel.layout import Node, Range, merges, split


class Evaluation:
    """A split, cut into batches that are the leaves of a canonical tree.

    Attributes:
        num_samples: number of samples of the split.
    """

    def __init__(
        self,
        task: Task,
        split_name: str,
        dataset: Dataset[Any],
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.num_samples = dataset_size(dataset, split_name)
        if self.num_samples < 1:
            raise DataError(f"dataset({split_name!r}): is empty; return None if there is none")
        self._fetcher = Fetcher(dataset, own_collate(task))
        self._batch_size = batch_size
        self._device = device
        self._seed = seed

    def run(self, transport: Transport, model: nn.Module, compute: Compute) -> dict[str, float]:
        """Loss and metrics, each a sum over all samples divided by its weight."""
        num_chunks = -(-self.num_samples // self._batch_size)
        chunks = split(num_chunks, transport.size)
        model.eval()
        try:
            mine = everywhere(
                transport,
                lambda: self._chunks(chunks[transport.rank], model, compute, transport),
            )
        finally:
            model.train()
        return _means(transport, [len(c) for c in chunks], mine)

    def _chunks(
        self, chunks: Range, model: nn.Module, compute: Compute, transport: Transport
    ) -> list[dict[str, tuple[float, float]]]:
        """Every batch of `chunks`, each from the same parameters and buffers.

        Raises:
            TaskError: one of them changes a parameter.
        """
        # What a batch changes would depend on how many batches this rank has.
        kept = KeptBuffers(model)
        constants = Constants(model, kept.names)
        values = []
        for chunk in range(*chunks):
            try:
                values.append(self._chunk(chunk, compute, transport))
            finally:
                kept.restore()
            constants.check(f"evaluation of batch {chunk}")
        return values

    def first_batch(
        self, transport: Transport, model: nn.Module, compute: Compute
    ) -> dict[str, tuple[float, float]]:
        """Loss and metrics of the first batch, each as (sum, weight); talks to nobody."""
        model.eval()
        try:
            return self._chunks(Range(0, 1), model, compute, transport)[0]
        finally:
            model.train()

    def _chunk(
        self, chunk: int, compute: Compute, transport: Transport
    ) -> dict[str, tuple[float, float]]:
        transport.pulse.beat()
        first = chunk * self._batch_size
        indices = torch.arange(first, min(first + self._batch_size, self.num_samples))
        request = Request(random_key(self._seed, Stream.EVALUATION, chunk), indices)
        batch = to_device(self._fetcher[request], self._device)
        return compute.evaluate(chunk, batch)


def _means(
    transport: Transport, counts: Sequence[int], mine: list[dict[str, tuple[float, float]]]
) -> dict[str, float]:
    names = next(n for n in transport.gather_json([sorted(c) for c in mine[:1]]) if n)[0]
    rows = [[value for name in names for value in chunk[name]] for chunk in mine]
    width = 2 * len(names)
    own = torch.tensor(rows, dtype=torch.float64).reshape(-1)
    everyone = transport.gather_host(own, [n * width for n in counts]).view(-1, width)
    leaves = [Node(i, 1) for i in range(len(everyone))]
    plan, _ = merges(leaves, len(leaves))
    total = add_up(list(everyone), plan).tolist()
    return {
        name: s / w if w else float("nan")
        for name, s, w in zip(names, total[::2], total[1::2], strict=True)
    }
