"""A trained model of the recipe, and its answers after each segment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.config import load, override
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.passes.precision import autocast
from lockstep.engine.snapshot.compatibility import check_fits, load_model
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.model import build_model
from lockstep.errors import ConfigError, DataError
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.process import num_threads
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.puzzles import Indices
from lockstep.systems.hrm.reasoning import ReasoningModel, halts
from lockstep.systems.hrm.reports.rules import Kind, Tokens, kind_of
from lockstep.systems.hrm.task import Hrm

MOST_SEGMENTS = 64
"""As for `eval_segments`."""

MOST_TOKENS = 256
"""A token is stored in a byte."""

_SPLITS = ("train", "val")


@dataclass(frozen=True)
class Answers:
    """A model's answers to some puzzles.

    Attributes:
        tokens: uint8 [S, B, cells], after each of S segments.
        q_halt: float32 [S, B], logits of halting after each segment.
        wants: bool [S, B], whether a puzzle would halt rather than go on.
    """

    tokens: npt.NDArray[np.uint8]
    q_halt: npt.NDArray[np.float32]
    wants: npt.NDArray[np.bool_]

    def segments(self, most: int) -> npt.NDArray[np.int64]:
        """The number of segments after which each puzzle halts, at most `most`, int64 [B]."""
        wants = self.wants[:most]
        return np.where(wants.any(axis=0), wants.argmax(axis=0) + 1, len(wants)).astype(np.int64)

    def after(self, segments: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The answers [B, cells] after the given number of segments of each puzzle [B]."""
        return np.asarray(self.tokens[segments - 1, np.arange(len(segments))])


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run in evaluation mode.

    Attributes:
        task: task of the run, with the average of parameters if there is one.
        model: the model, with the parameters of the checkpoint.
        config: config of the run.
        step: number of optimizer steps before the checkpoint.
        kind: kind of the puzzles.
        device: device of the model.
        is_other_data: whether the puzzles differ from those that the run was trained on.
    """

    task: Hrm
    model: ReasoningModel
    config: HrmConfig
    step: int
    kind: Kind
    device: torch.device
    is_other_data: bool

    @property
    def warnings(self) -> list[str]:
        """Warnings that belong to all scores."""
        if not self.is_other_data:
            return []
        return ["warning: the puzzles are not those that the run was trained on"]

    def puzzles(self, split: str) -> tuple[Tokens, Tokens]:
        """Inputs and labels [N, cells] of a split.

        Raises:
            ConfigError: there is no such split.
            DataError: the dataset is damaged or empty.
        """
        if split not in _SPLITS:
            raise ConfigError(f"--split {split}: must be one of {', '.join(_SPLITS)}")
        dataset = self.task.dataset(split)
        assert dataset is not None
        inputs, labels = dataset.tensors[:2]
        if not len(inputs):
            raise DataError(f"--split {split}: has no puzzles")
        return inputs.numpy(), labels.numpy()

    def identifiers(self, split: str) -> Indices | None:
        """The identifiers of a split's puzzles, int64 [N]; None if the model takes none."""
        return self.task.puzzles[split].example_identifiers if self.config.puzzle_ids else None

    def batches(
        self, inputs: Tokens, segments: int, identifiers: Indices | None = None
    ) -> Iterator[tuple[slice, Answers]]:
        """The answers to puzzles [N, cells], by the batches of an evaluation; see `answers`."""
        size = self.config.eval_batch_size
        for first in range(0, len(inputs), size):
            which = slice(first, min(first + size, len(inputs)))
            known = None if identifiers is None else identifiers[which]
            yield which, self.answers(inputs[which], segments, known)

    def answers(self, inputs: Tokens, segments: int, identifiers: Indices | None = None) -> Answers:
        """The model's answers to puzzles, computed as `lockstep eval` does.

        No puzzle halts early: its answer after a segment does not depend on how many follow.

        Args:
            inputs: tokens [B, cells].
            segments: number of segments, at least 1.
            identifiers: of the puzzles, int64 [B]; None for the blank identifier.
        """
        items = (f"eval_segments={segments}", "early_halting=false")
        solver = Hrm(override(self.config, items))
        solver.average = self.task.average
        tokens = torch.from_numpy(np.asarray(inputs, np.int64)).to(self.device)
        with (
            num_threads(self.config.threads, detect(os.environ)),
            torch.no_grad(),
            autocast(self.config.precision, self.device),
        ):
            solved = solver.solve(self.model, tokens, self._identifiers(identifiers, len(tokens)))
        # Numbered 0 of 1, no segment is the last one, at which every puzzle halts.
        number = torch.zeros(len(tokens), dtype=torch.int64, device=self.device)
        wants = [halts(*q, number, 1, False, early=True).cpu().numpy() for q in solved.halting]
        return Answers(
            np.stack([some.argmax(-1).to(torch.uint8).cpu().numpy() for some in solved.logits]),
            np.stack([q_halt.float().cpu().numpy() for q_halt, _ in solved.halting]),
            np.stack(wants),
        )

    def _identifiers(self, identifiers: Indices | None, count: int) -> Tensor | None:
        """The identifiers [B] that the model takes, blank ones where they are unknown."""
        if not self.config.puzzle_ids:
            return None
        if identifiers is None:
            identifiers = np.full(count, self.task.puzzles["val"].blank)
        return torch.from_numpy(identifiers).to(self.device)


def load_trained(run_dir: Path, which: str) -> TrainedModel:
    """The model of a run's checkpoint.

    Args:
        run_dir: run directory.
        which: `best`, `latest`, or a step's number.

    Raises:
        LockstepError: there is no such run or checkpoint, or it is not of this recipe.
    """
    directory = RunDirectory(run_dir)
    target = directory.identity().target
    if target != "hrm":
        raise ConfigError(f"{run_dir}: is a run of {target or 'a script'}, not of hrm")
    snapshot = find_snapshot(directory.checkpoints, which)
    config = load(HrmConfig, run_dir / "config.yaml")
    # A GPU if there is one, even for a run that was trained elsewhere.
    has_gpu = torch.cuda.is_available() and config.device != "cpu"
    task, device = Hrm(config), torch.device("cuda" if has_gpu else "cpu")
    with kept_generators():
        model = cast(ReasoningModel, build_model(task, config, device))
    check_fits(snapshot, model, str(directory.checkpoints))
    load_model(snapshot, model)
    TaskState(task, task.hooks()).restore(snapshot.task, snapshot.meta.get("task", {}))
    if model.sizes.vocabulary > MOST_TOKENS:
        raise ConfigError(
            f"{run_dir}: its puzzles have {model.sizes.vocabulary} tokens; at most {MOST_TOKENS} "
            "can be shown"
        )
    kind = kind_of(model.sizes.vocabulary, model.sizes.length)
    known = snapshot.meta["sampler"].get("task_digest")
    is_other = known is not None and task.data_digest() != known
    return TrainedModel(task, model.eval(), config, snapshot.step, kind, device, is_other)
