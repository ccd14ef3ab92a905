"""Metrics of a whole split, distributed over ranks, exact on any number of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from lockstep.comm.transport import LocalTransport, Transport
from lockstep.config import TrainConfig
from lockstep.data.attributes import AttributeGuard
from lockstep.data.random import data_digest
from lockstep.engine.audit.pass_state import PassState, is_check_due
from lockstep.engine.audit.repetition import Repetition, depends_on
from lockstep.engine.evaluation.batches import (
    EvaluationBatches,
    Scores,
    evaluated_splits,
    evaluation_batches,
)
from lockstep.engine.evaluation.metrics import Leaf, StatefulMetrics, plain, tried
from lockstep.engine.passes.buffers import Constants, KeptBuffers
from lockstep.engine.passes.compute import Compute
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import everywhere, on_its_own
from lockstep.engine.tables.step_tables import AllFetched, Tables
from lockstep.engine.task import Task
from lockstep.errors import TaskError, shared
from lockstep.nn.row import StageDone
from lockstep.parallel.exchange import add_up
from lockstep.parallel.layout import Node, merges

Sums = dict[str, tuple[float, float]]
"""Loss and metrics of a batch by name, each as (sum, weight)."""


class Evaluation:
    """A split, cut into batches that are the leaves of a canonical tree.

    Attributes:
        dataset: the split.
        num_samples: of the split; None for a stream without a length.
    """

    def __init__(self, task: Task, batches: EvaluationBatches) -> None:
        self.dataset = batches.dataset
        self.num_samples = batches.num_samples
        self._batches = batches
        self._guard = AttributeGuard()
        self._metrics = StatefulMetrics(task, batches.device)

    def run(
        self,
        transport: Transport,
        model: nn.Module,
        compute: Compute,
        beat: Callable[[], None] = lambda: None,
        placement: Placement | None = None,
        tables: Tables | None = None,
    ) -> Scores:
        """Loss and metrics, each a sum over all samples divided by its weight, and others.

        Args:
            transport: all ranks.
            model: model to evaluate.
            compute: computation of `Task.evaluate`.
            beat: function that is called before each batch, the heartbeat of this process.
            placement: place of each rank on the mesh, whose replicas share the batches; without it,
                each rank is a replica.
            tables: tables whose rows are distributed, if there are any.
        """
        data, number, num_replicas = transport, transport.rank, transport.size
        if placement is not None and placement.is_split:
            data, number, num_replicas = (
                placement.data,
                placement.replica_number,
                len(placement.mesh.replicas),
            )
        mine: Iterable[tuple[int, Any]] = ()
        if number < num_replicas:
            mine = self._batches.of_rank(number, num_replicas)

        def compute_leaves() -> list[tuple[Sums, Leaf]]:
            if placement is None:
                return self._computed(mine, model, compute, beat)
            placement.refresh()
            if tables is not None:
                return self._computed(mine, model, compute, beat, tables)
            return self._computed(
                placement.stage_order.of(mine, placement.storage), model, compute, beat
            )

        together = compute_leaves
        if placement is not None:
            together = partial(placement.together, compute_leaves)
        with eval_mode(model):
            if placement is not None and placement.are_coupled and not placement.can_wake:
                leaves = on_its_own(transport, together)  # only its end wakes those that wait
            else:
                leaves = everywhere(transport, together)
        scored: Callable[[], Scores] = partial(Scores, {}, {})
        if placement is None or placement.are_scored:
            scored = self._scored(data, num_replicas, leaves)
        scores = everywhere(transport, scored)
        if placement is not None and placement.are_staged:
            theirs = transport.gather_json([scores.metrics, scores.arrays])[placement.scoring]
            scores = Scores(*theirs)
        return scores

    def _scored(
        self, data: Transport, num_replicas: int, leaves: Sequence[tuple[Sums, Leaf]]
    ) -> Callable[[], Scores]:
        """What computes loss and metrics of all batches; a collective of those that have some.

        Args:
            data: group of ranks, of which the first `num_replicas` have computed batches.
            num_replicas: number of these.
            leaves: of each batch of this rank.
        """
        known = data.gather_json([len(leaves), *(sorted(sums) for sums, _ in leaves[:1])])
        counts = [count for count, *_ in known[:num_replicas]]
        names = next(theirs for _, *theirs in known if theirs)[0]
        numbers = [self._batches.numbers(n, num_replicas, counts) for n in range(num_replicas)]
        numbers += [[] for _ in range(data.size - num_replicas)]
        means, finish = self._combined(data, leaves, names, numbers)

        def scored() -> Scores:
            scalars, arrays = plain(finish())
            return Scores(_united(means, scalars), arrays)

        return scored

    def watch(self, guard: AttributeGuard) -> None:
        """Notice attributes that one batch sets and another batch, or a microbatch, reads."""
        self._guard = guard
        self._batches.watch(guard)

    def first_digest(self) -> str:
        """SHA-256 of the first batch, which is fetched for it; not a collective."""
        return data_digest(self._batches.get(0))

    def compute_second_batch(self, model: nn.Module, compute: Compute) -> None:
        """Evaluate the second batch, if there is one, for what it leaves behind."""
        with eval_mode(model):
            batch = self._batches.get(1)
            if batch is not None:
                self._computed([(1, batch)], model, compute, lambda: None)

    def first_batch(self, model: nn.Module, compute: Compute) -> dict[str, float]:
        """Loss and metrics of the first batch; not a collective."""
        with eval_mode(model):
            leaves = self._computed([(0, self._batches.get(0))], model, compute, lambda: None)
        means, finish = self._combined(LocalTransport(), leaves, sorted(leaves[0][0]), [[0]])
        scalars, _ = plain(tried(finish, self._metrics.names))
        # The first batch may be without a loss, but not its split.
        return _united({"loss": math.nan} | means, scalars)

    def _computed(
        self,
        batches: Iterable[tuple[int, Any]],
        model: nn.Module,
        compute: Compute,
        beat: Callable[[], None],
        tables: Tables | None = None,
    ) -> list[tuple[Sums, Leaf]]:
        """Loss and metrics of batches, each from the same parameters and buffers.

        With tables, a collective: ranks send each other rows until all have computed theirs.

        Raises:
            TaskError: one of them changes a parameter.
        """
        # What a batch changes would depend on how many batches this rank has.
        kept = KeptBuffers(model)
        constants = Constants(model, kept.names)
        leaves = []

        def compute_one(number: int, batch: Any, fetched: AllFetched | None = None) -> None:
            beat()
            self._guard.enter((self._batches.split_name, number))
            try:
                sums, updates = compute.evaluate(number, batch, fetched)
            except StageDone as done:
                done.send()
                return
            finally:
                kept.restore()
            constants.check(f"evaluation of batch {number}")
            leaves.append((sums, self._metrics.leaf(updates)))

        if tables is not None:
            tables.serve(batches, compute.wanted_to_evaluate, compute_one)
        else:
            for number, batch in batches:
                compute_one(number, batch)
        return leaves

    def _combined(
        self,
        transport: Transport,
        mine: Sequence[tuple[Sums, Leaf]],
        names: Sequence[str],
        numbers: Sequence[Sequence[int]],
    ) -> tuple[dict[str, float], Callable[[], dict[str, Any]]]:
        """Means over all batches, and a function that computes the other metrics; a collective.

        A loss whose weight is 0 is left out: a task may have other metrics only.

        Args:
            transport: the group of ranks.
            mine: of each batch of this rank.
            names: of the means.
            numbers: for each rank, the numbers of its batches.
        """
        rows = [
            [value for name in names for value in sums[name]] + self._metrics.summed(leaf)
            for sums, leaf in mine
        ]
        width = 2 * len(names) + self._metrics.num_summed
        own = torch.tensor(rows, dtype=torch.float64).reshape(-1)
        counts = [len(of_rank) * width for of_rank in numbers]
        everyone = transport.gather_host(own, counts).view(-1, width)
        order = [number for of_rank in numbers for number in of_rank]
        leaves = [row for _, row in sorted(zip(order, everyone, strict=True), key=itemgetter(0))]
        plan, _ = merges([Node(i, 1) for i in range(len(leaves))], len(leaves))
        total = add_up(leaves, plan).tolist()
        pairs = zip(names, total[: 2 * len(names) : 2], total[1 : 2 * len(names) : 2], strict=True)
        means = {name: s / w if w else math.nan for name, s, w in pairs if w or name != "loss"}
        finish = self._metrics.compute(
            transport, [leaf for _, leaf in mine], total[2 * len(names) :], numbers
        )
        return means, finish


class EvaluationAudit:
    """Repeats an evaluation, and compares both, if its batches have left suspicious state behind.

    An evaluation decides when a run ends and which checkpoint is best. The state that batches leave
    behind depends on which of them this rank has evaluated.
    """

    def __init__(self, transport: Transport, state: PassState) -> None:
        self._transport = transport
        self._state = state
        self._counts: dict[str, int] = {}

    def run(self, split: str, evaluate: Callable[[], Scores]) -> Scores:
        """Evaluate a split; a collective.

        Args:
            split: name of the split.
            evaluate: computes its scores, on all ranks.

        Raises:
            TaskError: the repetition gave another result; on all ranks.
        """
        count = self._counts[split] = self._counts.get(split, 0) + 1
        batches = Repetition(self._state)
        is_due = is_check_due(count)
        if is_due:
            self._state.note_values()
        scores = self._once(batches, evaluate, is_due)
        suspects = batches.suspects_of_all(self._transport)
        if suspects:
            self._repeat(split, evaluate, batches, suspects, scores)
        if is_due:
            self._state.collect_leftovers()
        return scores

    def _repeat(
        self,
        split: str,
        evaluate: Callable[[], Scores],
        batches: Repetition,
        suspects: Sequence[str],
        scores: Scores,
    ) -> None:
        """Evaluate again, and compare."""
        batches.is_second = True
        again = self._once(batches, evaluate)

        def check() -> None:
            if repr(again) != repr(scores):
                raise depends_on(f"the evaluation of {split}", suspects)
            batches.check_unchanged()
            batches.trust()

        everywhere(self._transport, check)

    def _once(
        self, batches: Repetition, evaluate: Callable[[], Scores], is_due: bool = False
    ) -> Scores:
        batches.begin(is_due)
        try:
            return evaluate()
        finally:
            batches.end()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within it, and in training mode after it."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def _united(means: dict[str, float], scalars: dict[str, float]) -> dict[str, float]:
    twice = sorted(means.keys() & scalars.keys())
    if twice:
        raise shared(
            TaskError(
                f"Task.metrics: {twice[0]!r} is the name of a metric of Loss.metrics too; give it "
                "another one"
            )
        )
    return means | scalars


def evaluations(
    task: Task, config: TrainConfig, device: torch.device, splits: Sequence[str] | None = None
) -> dict[str, Evaluation]:
    """The evaluations of those of `splits` that the task has; by default of all that it names."""
    names = evaluated_splits(task) if splits is None else splits
    datasets = {name: task.dataset(name) for name in names}
    size, seed = config.eval_batch_size, config.seed
    return {
        name: Evaluation(task, evaluation_batches(task, name, data, size, device, seed))
        for name, data in datasets.items()
        if data is not None
    }
