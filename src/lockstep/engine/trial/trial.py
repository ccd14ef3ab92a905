"""Computing a microbatch several times before training, to find what would differ between ranks.

A run is a pure function of config, data and seed only if a microbatch is: the same samples, random
state, parameters and buffers must give the same gradient, whatever this process has computed
before. So the first microbatch is fetched and computed twice, once more after another one, and once
more after an evaluation; and everything visible is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import BatchSource
from lockstep.data.random import IdleGenerators, data_digest, global_state, seed_all
from lockstep.engine.audit.hidden_state import Walk, differing, hidden_state
from lockstep.engine.audit.hints import shards_explained
from lockstep.engine.audit.pass_state import named, remedy
from lockstep.engine.audit.reachable import (
    attributes_read,
    has_memory,
    module_globals,
    modules_around,
)
from lockstep.engine.carry import Carries
from lockstep.engine.digests import checksum, tensors_digest
from lockstep.engine.evaluation.evaluation import Evaluation
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.passes.buffers import batch_norm_buffers, changed_by
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Loss, Task
from lockstep.engine.task_config import is_scratch
from lockstep.engine.trial.cut_model import StageRehearsal, differs_on_stages
from lockstep.engine.trial.drawn_blocks import DrawnBlocks
from lockstep.engine.trial.outcome import (
    Outcome,
    Rehearsal,
    another_batch,
    check_equal,
    check_evaluated,
    check_rehearsed,
    read_on_other_rank,
)
from lockstep.errors import TaskError
from lockstep.nn.tape import storage_of


class Trial:
    """Computes the first microbatch several times.

    Attributes:
        changed: names of the buffers that a forward pass changes.
        data_digest: SHA-256 of the microbatch.
        digest: SHA-256 of its loss, metrics and gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: FlatTensors,
        compute: Compute,
        loader: BatchSource,
        drawn: DrawnBlocks | None = None,
    ) -> None:
        """Compute it twice, and once more after another microbatch; not a collective.

        From then on, nothing may draw from random generators that were not drawn from here.

        Args:
            model: model in training mode.
            flat: trainable parameters of the model in flat memory.
            compute: loss of the task.
            loader: loader of the training samples.
            drawn: where parameters are, if they are drawn block by block; it has begun.

        Raises:
            TaskError: something is not the same every time, or a parameter has changed.
        """
        is_scratch(compute.task, "")
        self._model = model
        self.use(flat)
        self._compute = compute
        self._loader = loader
        self._end_pass: Callable[[], None] = drawn.end_pass if drawn else _nothing
        self._freed: dict[int, int] = drawn.gradients if drawn else {}
        self._drawn = drawn
        self._stages: StageRehearsal | None = None
        at_first = self._state()
        self._first = self._run()
        once = self._state()
        again = self._run()
        twice = Walk(self._roots())
        _check_unchanged(once, twice.texts, compute.task)
        check_equal(self._first, again)
        others = [self._try_phase(step) for step in compute.phases.first_steps[1:]]
        self._by_step = dict(zip(compute.phases.first_steps, (self._first, *others), strict=True))
        self._watch_generators(at_first, Walk(self._roots()) if others else twice)
        self._check_after(lambda: self._pass(1))
        self._check_left_over(self._state() if others else twice.texts)
        # A layer of batch norm that is used in later steps only would not be noticed here.
        always = batch_norm_buffers(model)
        changed = [name for one in (self._first, again, *others) for name in one.changed]
        self.changed = sorted({*changed, *always})
        self.data_digest = self._first.batch
        self.digest = "".join(one.digest for one in (self._first, *others))

    def use(self, flat: FlatTensors) -> None:
        """Take gradients of parameters in the order of this memory from now on."""
        self._named = list(zip([e.name for e in flat.entries], flat.tensors, strict=True))

    def repeat(self) -> None:
        """Compute the first microbatch of each phase once more, for what watches the model."""
        for step in self._compute.phases.first_steps:
            self._run(step)

    def rehearse_stages(self, rehearsal: StageRehearsal) -> None:
        """Compute everything once more, as stages do.

        Args:
            rehearsal: computes one stage after another.

        Raises:
            TaskError: a result differs.
        """
        self._stages = rehearsal
        for step, expected in self._by_step.items():
            check_rehearsed(self._where(step), expected, self._run(step), differs_on_stages)
        self._stages = None

    def _where(self, step: int) -> str:
        phase = self._compute.phases.at(step).name
        return f"Task.{phase}: the loss" if phase else "Task.loss"

    def rehearse(
        self, rehearsal: Rehearsal, evaluations: Mapping[str, tuple[Evaluation, Mapping[str, Any]]]
    ) -> None:
        """Compute everything once more, with the parameters of one block at a time.

        Args:
            rehearsal: provides the parameters of each block while it is computed.
            evaluations: evaluations by split, and the metrics of their first batch.

        Raises:
            TaskError: a result differs.
        """
        with rehearsal.begun():
            self._end_pass, self._freed = rehearsal.end_pass, rehearsal.gradients
            for step, expected in self._by_step.items():
                now = self._run(step)
                check_rehearsed(self._where(step), expected, now, read_on_other_rank)
            self._end_pass, self._freed = _nothing, {}
            for split, (evaluation, expected_metrics) in evaluations.items():
                there = evaluation.first_batch(self._model, self._compute)
                for name, value in expected_metrics.items():
                    if repr(value) != repr(there[name]):
                        raise TaskError(read_on_other_rank(f"Task.evaluate: {name} of {split}"))

    def gradients(self) -> list[Tensor | None]:
        """The gradients of the first microbatch, which is computed once more; not a collective."""
        made: list[Tensor | None] = []

        def compute() -> None:
            self._pass(0)
            made.extend(tensor.grad for _, tensor in self._named)

        changed_by(self._model, compute)
        self._compute.lookups.fetch(None)
        self._clear_gradients()
        return made

    def check_views(self, memories: Set[int]) -> None:
        """Refuse views of parameters that are kept between batches.

        Args:
            memories: numbers of the memory of all parameters (`lockstep.nn.tape.storage_of`).

        Raises:
            TaskError: naming one.
        """
        for path, tensor in Walk(self._roots()).tensors.items():
            if has_memory(tensor) and storage_of(tensor) in memories:
                raise TaskError(
                    f"{path}: keeps a view of a parameter, whose memory moves with mesh.pp, "
                    "mesh.tp and sharding=parameters; take it from the parameter in each forward "
                    "pass, or set mesh.pp=1, mesh.tp=1 and at most sharding=gradients"
                )

    def evaluate(self, split: str, val: Evaluation) -> dict[str, object]:
        """Evaluate a batch, and compute the microbatch once more; not a collective.

        The batch is evaluated again after another one.

        Args:
            split: name of the split.
            val: its evaluation.

        Returns:
            The batch's metrics by name.

        Raises:
            TaskError: as above.
        """
        metrics: dict[str, object] = {}

        def first() -> Mapping[str, object]:
            with self._watched():
                return val.first_batch(self._model, self._compute)

        def second() -> None:
            with self._watched():
                val.compute_second_batch(self._model, self._compute)

        with shards_explained(self._model):
            digest = val.first_digest()
            self._check_after(lambda: metrics.update(first()))
            changed_by(self._model, second)
            if val.first_digest() != digest:
                raise TaskError(another_batch(split))
            again = first()
        check_evaluated(split, metrics, again)
        return metrics

    def _check_after(self, other: Callable[[], object]) -> None:
        changed_by(self._model, other)
        self._clear_gradients()
        check_equal(self._first, self._run())

    def _check_left_over(self, after_first: Mapping[str, str]) -> None:
        """Refuse state of the last microbatch that `after_step` reads: ranks have different ones.

        `_check_after` has computed the first microbatch last, so another one is computed here.
        """
        task = self._compute.task
        read = attributes_read(type(task), "after_step")
        if not read:
            return
        changed_by(self._model, lambda: self._pass(1))
        self._clear_gradients()
        for path, value in self._state().items():
            owner, _, name = path.partition("[")[0].rstrip("!").rpartition(".")
            differs = after_first.get(path) != value and owner.startswith(("task", "model"))
            if differs and name in read and not is_scratch(task, path):
                raise TaskError(
                    f"{owner}.{name}: is what the last microbatch of this rank has left there, and "
                    "after_step reads it; ranks have other last microbatches. Take it from the "
                    "parameters or buffers instead: a buffer that a forward pass changes is "
                    "averaged over all microbatches"
                )

    def _state(self) -> dict[str, str]:
        return hidden_state(self._roots())

    def _roots(self) -> dict[str, object]:
        task = self._compute.task
        roots = {"task": task, "dataset('train')": self._loader.dataset, "model": self._model}
        kinds = {type(task), *map(type, self._model.modules())}
        return roots | module_globals(type(task), modules_around(kinds))

    def _watch_generators(self, at_first: Mapping[str, str], now: Walk) -> None:
        # The task seeds those for each sample that were drawn from and yet have not changed.
        idle = {
            path: generator
            for path, generator in now.generators.items()
            if at_first.get(path) == now.texts[path] and not is_scratch(self._compute.task, path)
        }
        self._loader.watched = self._compute.watched = IdleGenerators(idle)

    def _try_phase(self, step: int) -> Outcome:
        """Compute the first microbatch of another phase twice."""
        first = self._run(step)
        before = self._state()
        again = self._run(step)
        _check_unchanged(before, self._state(), self._compute.task)
        check_equal(first, again)
        return first

    def _run(self, step: int = 0) -> Outcome:
        passed: list[tuple[str, Loss, list[object], str]] = []
        changed = changed_by(self._model, lambda: passed.append(self._pass(step)))
        digest, loss, drawn, carry = passed[0]
        gradients = {name: self._checksum(name, tensor) for name, tensor in self._named}
        rows = self._rows_digest()
        self._compute.lookups.fetch(None)
        self._clear_gradients()
        values = {"loss": (loss.sum.detach(), loss.weight), **loss.metrics}
        return Outcome(digest, drawn, values, gradients, changed, carry, rows)

    def _rows_digest(self) -> str:
        """SHA-256 of the gradients of the rows of tables that were looked up."""
        tensors: dict[str, Tensor] = {}
        for name, table in self._compute.lookups.tables.items():
            assert table.fetched is not None, "a forward pass has fetched rows"
            ids, rows = table.fetched
            if not rows.is_cpu:
                return ""
            gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
            tensors |= {f"numbers of {name}": ids, name: gradient}
        return tensors_digest(tensors) if tensors else ""

    def _checksum(self, name: str, tensor: Tensor) -> int | None:
        """The checksum of a gradient, also of one that was freed when its block was left."""
        gradient, freed = tensor.grad, self._freed.pop(id(tensor), None)
        if gradient is None:
            return freed
        if gradient.layout != torch.strided:
            raise TaskError(
                f"parameter {name}: has a sparse gradient, which cannot be summed in order; "
                "build its layer without `sparse=True`"
            )
        return checksum(gradient) if gradient.device.type == "cpu" else None

    def _pass(self, step: int) -> tuple[str, Loss, list[object], str]:
        seed_all(0)  # a dataset of tensors is fetched without
        batch = self._loader.microbatch(step, 0)
        digest, drawn = data_digest(batch), [global_state()]  # the loss may change it in place
        carries = Carries()
        with self._watched():
            with shards_explained(self._model):
                loss = self._forward(step, batch, carries)
            drawn.append(global_state())
            loss.sum.backward(inputs=self._compute.targets(step))  # type: ignore[no-untyped-call]
        self._end_pass()
        carry = carries.pending.get(0)
        return digest, loss, drawn, carry.digest if carry else ""

    def _watched(self) -> AbstractContextManager[None]:
        """Within it, parameters must be read in their blocks; stages read others in vain."""
        is_watched = self._drawn is not None and self._stages is None
        return self._drawn.watched() if self._drawn and is_watched else nullcontext()

    def _forward(self, step: int, batch: Any, carries: Carries) -> Loss:
        if self._stages is None:
            return self._compute.forward(step, 0, batch, carries)
        # A loss may change its batch, and each stage computes it from the beginning.
        return self._stages.loss(
            lambda: self._compute.forward(step, 0, copy.deepcopy(batch), carries)
        )

    def _clear_gradients(self) -> None:
        self._freed.clear()
        for parameter in self._model.parameters():
            parameter.grad = None


def _nothing() -> None:
    pass


def _check_unchanged(before: Mapping[str, str], after: Mapping[str, str], task: Task) -> None:
    paths = dict.fromkeys(path.removesuffix("!") for path in differing(before, after))
    moved = [path for path in paths if not is_scratch(task, path)]
    if moved:
        raise TaskError(
            f"{named(moved)}: is changed by every microbatch, so it depends on how many this rank "
            f"computes. {remedy(moved[0])}"
        )
