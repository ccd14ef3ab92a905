"""The task of puzzles that are solved in segments, in slots that continue across steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.hook import Hook
from lockstep.engine.optimizer.choice import default_optimizer
from lockstep.engine.task import Loss, Task
from lockstep.hooks import EMA
from lockstep.nn import SparseEmbedding
from lockstep.optim import AdamATan2, RowSignSGD
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.names import checked_names, names_digest
from lockstep.systems.hrm.puzzles import Puzzles, puzzles_of
from lockstep.systems.hrm.reasoning import (
    IGNORED,
    HierarchicalModel,
    ReasoningModel,
    RecursiveModel,
    Sizes,
    accuracy,
    continue_target,
    draw_min_steps,
    exact,
    halting_loss,
    halts,
    refill,
    softmax_cross_entropy,
    stablemax_cross_entropy,
)
from lockstep.systems.hrm.reports.rules import simple_answers

Batch = tuple[Tensor, ...]
"""Tokens and labels [B, length], as they are stored: label 0 has no answer. With `puzzle_ids`, also
identifiers [B], int64."""

Slots = dict[str, Tensor]
"""`inputs` and `labels` of each slot's puzzle, `z_H` and `z_L`, `steps`: segments so far; with
`puzzle_ids`, also `identifiers`."""


class Solved(NamedTuple):
    """The answers to a batch.

    Attributes:
        logits: logits [B, length, vocabulary] after each segment, which stay as they are once a
            puzzle has halted (`early_halting`).
        steps: number of segments of each puzzle [B].
        halting: logits of halting and of going on [B] after each segment, see
            `ReasoningModel.forward`.
    """

    logits: list[Tensor]
    steps: Tensor
    halting: list[tuple[Tensor, Tensor | None]]


class Hrm(Task):
    """Puzzles, solved in segments by a small recursive or hierarchical model.

    A step is one segment of all slots. A slot that has halted takes the puzzle at its index in the
    batch; the batch's other puzzles are dropped (arXiv:2506.21734, section 2).
    """

    Config = HrmConfig
    config: HrmConfig
    splits = ("val",)

    def __init__(self, config: HrmConfig | None = None) -> None:
        super().__init__(config)
        self.average = EMA(self.config.ema) if self.config.ema else None

    @cached_property
    def puzzles(self) -> dict[str, Puzzles]:
        """The puzzles of each split.

        Raises:
            ConfigError: there are no such puzzles.
            DataError: the dataset is missing or damaged.
        """
        return puzzles_of(self.config)

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of all puzzle identifiers, in order.

        Raises:
            DataError: the dataset has no names, or they do not fit its puzzles; see
                `checked_names`.
        """
        folder = self.config.data_dir
        if folder is None:
            return self.puzzles["val"].names
        return checked_names(folder.expanduser(), self.puzzles)

    def build_model(self) -> ReasoningModel:
        """The model that `config.model` names, for the tokens of the puzzles.

        Raises:
            ConfigError: sizes do not fit together.
        """
        config, puzzles = self.config, self.puzzles["train"]
        table = None
        if config.puzzle_ids:
            # The rows start as zeros, and move by the sign of their gradient, as published.
            update = RowSignSGD(config.scaled(config.puzzle_lr), config.puzzle_weight_decay)
            table = SparseEmbedding(puzzles.num_identifiers, config.row_dim, update)
        sizes = Sizes(
            puzzles.vocabulary,
            puzzles.length,
            config.dim,
            config.num_heads,
            config.expansion,
            config.inner_multiple,
            config.row_dim if config.puzzle_ids else 0,
            config.puzzle_tokens if config.puzzle_ids else None,
        )
        blocks, high, low = config.num_blocks, config.high_cycles, config.low_cycles
        if config.model == "hierarchical":
            return HierarchicalModel(sizes, blocks, blocks, high, low, table)
        return RecursiveModel(sizes, blocks, high, low, config.mixing, table)

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        """AdamATan2, or one of torch's, with the learning rate for the batch."""
        keys, lr = self.config.optimizer, self.config.scaled(self.config.lr)
        if keys.name == "adam_atan2":
            return AdamATan2(model.parameters(), lr, keys.betas, keys.weight_decay)
        return default_optimizer(model, self.config.model_copy(update={"lr": lr}))

    def dataset(self, split: str) -> TensorDataset | None:
        """Tokens and labels of a split, as stored; with `puzzle_ids` identifiers too.

        Raises:
            ConfigError: there are no such puzzles.
            DataError: the dataset is damaged.
        """
        if split not in self.puzzles:
            return None
        puzzles = self.puzzles[split]
        if self.config.puzzle_ids:
            identifiers = torch.from_numpy(puzzles.example_identifiers)
            return TensorDataset(puzzles.inputs, puzzles.labels, identifiers)
        return TensorDataset(puzzles.inputs, puzzles.labels)

    def data_digest(self) -> str:
        """SHA-256 of all puzzles; with `puzzle_ids` also of their identifiers and names.

        Raises:
            DataError: with `puzzle_ids`, as `names`.
        """
        if self.config.puzzle_ids:
            digests = [puzzles.identified_digest for puzzles in self.puzzles.values()]
            digests.append(names_digest(self.names))
        else:
            digests = [puzzles.digest for puzzles in self.puzzles.values()]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def epoch_indices(self, epoch: int, generator: np.random.Generator) -> Any:
        """A random puzzle of each group, in random order, repeatedly."""
        return self.puzzles["train"].epoch(self.config.batch_size, generator)

    def hooks(self) -> list[Hook]:
        """The average of parameters, if `ema` is above 0."""
        return [self.average] if self.average is not None else []

    def lookups(self, batch: Batch, carry: dict[str, Any]) -> Mapping[str, Tensor]:
        """With `puzzle_ids`, the identifiers whose rows the slots need, new puzzles included."""
        identifiers = torch.where(carry["halted"], batch[2], carry["slots"]["identifiers"])
        return {"puzzles": identifiers}

    def carry(self, model: ReasoningModel, batch: Batch) -> dict[str, Any]:
        """Slots that have all halted, so that they take new puzzles."""
        halted = torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device)
        return {"halted": halted, "slots": self._fresh(model, batch)}

    def loss(
        self, model: ReasoningModel, batch: Batch, carry: dict[str, Any]
    ) -> tuple[Loss, dict[str, Any]]:
        """One segment of all slots; metrics are over slots whose puzzle halts."""
        config = self.config
        slots = refill(carry["halted"], carry["slots"], self._fresh(model, batch))
        rows = _rows(model, slots.get("identifiers"))
        state, logits, q_halt, q_continue = model(slots, slots["inputs"].long(), rows)
        labels = _labels(slots["labels"])
        right = exact(logits, labels)
        losses = self._token_losses(logits, labels) + halting_loss(q_halt, right) / 2
        steps = slots["steps"] + 1
        if q_continue is not None:
            with torch.no_grad():
                _, _, next_halt, next_continue = model(state, slots["inputs"].long(), rows)
            target = continue_target(next_halt, next_continue, steps >= config.max_segments)
            losses = losses + halting_loss(q_continue, target) / 2
        least = draw_min_steps(len(steps), config.max_segments, config.explore, steps.device)
        halted = halts(q_halt, q_continue, steps, config.max_segments, True, least)
        count = halted.sum()
        metrics = {
            "exact": ((right & halted).sum(), count),
            "token_accuracy": ((accuracy(logits, labels) * halted).sum(), count),
            "segments": ((steps * halted).sum(), count),
        }
        after = {"halted": halted, "slots": {**slots, **state, "steps": steps}}
        return Loss(losses.sum(), len(steps), metrics), after

    def evaluate(self, model: ReasoningModel, batch: Batch) -> Loss:
        """All segments of a batch, by the average of parameters if there is one."""
        inputs, labels = batch[0].long(), _labels(batch[1])
        solved = self.solve(model, inputs, *batch[2:])
        logits, count = solved.logits[-1], len(inputs)
        metrics: dict[str, tuple[Tensor | int, int]] = {
            "exact": (exact(logits, labels).sum(), count),
            "token_accuracy": (accuracy(logits, labels).sum(), count),
        }
        if self.config.early_halting:
            metrics["segments"] = (solved.steps.sum(), count)
        return Loss(self._token_losses(logits, labels).sum(), count, metrics)

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """How puzzles are answered without a model."""
        return simple_answers(self.puzzles["train"], self.puzzles[split])

    def solve(
        self, model: ReasoningModel, inputs: Tensor, identifiers: Tensor | None = None
    ) -> Solved:
        """Solve puzzles.

        Args:
            model: the model.
            inputs: tokens, integers [B, length].
            identifiers: of the puzzles, integers [B], for a model that takes them.
        """
        config, rows = self.config, _rows(model, identifiers)
        state: Any = model.initial(len(inputs), self._state_dtype)
        halted = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        steps = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        answers: list[Tensor] = []
        halting: list[tuple[Tensor, Tensor | None]] = []
        for _ in range(config.eval_segments):
            state, logits, q_halt, q_continue = self._apply(model, state, inputs, rows)
            steps = steps + ~halted
            if answers:
                logits = torch.where(halted.view(-1, 1, 1), answers[-1], logits)
            answers.append(logits)
            halting.append((q_halt, q_continue))
            early = config.early_halting
            halted = halted | halts(
                q_halt, q_continue, steps, config.eval_segments, False, early=early
            )
        return Solved(answers, steps, halting)

    def _apply(self, model: ReasoningModel, *arguments: Any) -> Any:
        if self.average is not None and self.average.average:
            return self.average(model, *arguments)
        return model(*arguments)

    def _fresh(self, model: ReasoningModel, batch: Batch) -> Slots:
        """Slots that start with the puzzles of a batch."""
        inputs, labels = batch[:2]
        steps = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        state = model.initial(len(inputs), self._state_dtype)
        slots = {"inputs": inputs, "labels": labels, "steps": steps, **state}
        return {**slots, "identifiers": batch[2]} if self.config.puzzle_ids else slots

    @property
    def _state_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.config.precision.dtype == "bf16" else None

    def _token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.token_loss == "stablemax":
            return stablemax_cross_entropy(logits, labels)
        return softmax_cross_entropy(logits, labels)


def _rows(model: ReasoningModel, identifiers: Tensor | None) -> Tensor | None:
    return None if identifiers is None else model.rows(identifiers)


def _labels(stored: Tensor) -> Tensor:
    return torch.where(stored == 0, IGNORED, stored.long())
