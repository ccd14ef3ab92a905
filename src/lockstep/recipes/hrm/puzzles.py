"""The puzzles of a run: read from a dataset, or made; and the order in which they are learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.recipes.hrm.data.build import source
from lockstep.recipes.hrm.data.format import read_split
from lockstep.recipes.hrm.data.request import Options
from lockstep.recipes.hrm.data.writer import Puzzle

_LEAST_BATCHES = 8
"""Of an epoch, whose last batch is left out if it is not full."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Puzzles:
    """Examples of a split, by puzzle and by group.

    Attributes:
        inputs: tokens [N, length].
        labels: tokens [N, length]; 0 where there is nothing to answer.
        puzzles: int64 [P + 1]; puzzle p has the examples from the p-th to before the next.
        groups: int64 [G + 1]; group g, a puzzle and its augmentations, likewise.
        vocabulary: number of tokens.
    """

    inputs: Tensor
    labels: Tensor
    puzzles: Indices
    groups: Indices
    vocabulary: int

    @property
    def length(self) -> int:
        """Tokens of an example."""
        return self.inputs.shape[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything."""
        sha = hashlib.sha256(f"{self.vocabulary} {self.inputs.dtype}".encode())
        for array in (self.inputs.numpy(), self.labels.numpy(), self.puzzles, self.groups):
            sha.update(array.tobytes())
        return sha.hexdigest()

    def epoch(self, batch_size: int, generator: np.random.Generator) -> Indices:
        """Numbers of examples for an epoch: passes over all groups, as many as fill some batches.

        As published, a pass takes the groups in random order, and of each one a random puzzle with
        all of its examples.

        Args:
            batch_size: samples of a step.
            generator: draws the order.
        """
        num_groups = len(self.groups) - 1
        size = max(num_groups, _LEAST_BATCHES * batch_size)
        taken: list[Indices] = []
        num_taken = 0
        while num_taken < size:
            for group in generator.permutation(num_groups):
                puzzle = generator.integers(self.groups[group], self.groups[group + 1])
                first, last = self.puzzles[puzzle : puzzle + 2]
                taken.append(generator.permutation(np.arange(first, last)))
                num_taken += last - first
        return np.concatenate(taken)[:size]


def read(folder: Path, split: str) -> Puzzles:
    """A split of a dataset in the published format.

    Raises:
        DataError: it is missing or damaged, or has more sets than one.
    """
    found = read_split(folder, split)
    if len(found.sets) != 1:
        names = ", ".join(found.sets)
        raise DataError(f"{folder / split}: has the sets {names}; give a dataset with one")
    (one,) = found.sets.values()
    about = found.metadata
    labels = torch.from_numpy(np.array(one.labels)).long()
    if about.ignore_label_id not in (None, 0):
        labels = torch.where(labels == about.ignore_label_id, 0, labels)
    return Puzzles(
        _compact(torch.from_numpy(np.array(one.inputs)), about.vocab_size),
        _compact(labels, about.vocab_size),
        one.puzzle_indices,
        one.group_indices,
        about.vocab_size,
    )


def made(kind: str, options: Options) -> dict[str, Puzzles]:
    """Puzzles of both splits, made from a seed.

    Raises:
        ConfigError: the size is none of the kind.
    """
    found = source(kind, options)
    groups: dict[str, list[list[Puzzle]]] = {"train": [], "test": []}
    for split, group in found.groups(lambda name: 0):
        groups[split].append(group)
    return {split: _joined(of_split, found.vocab_size) for split, of_split in groups.items()}


def _joined(groups: list[list[Puzzle]], vocabulary: int) -> Puzzles:
    puzzles = [puzzle for group in groups for puzzle in group]
    inputs = np.concatenate([puzzle.inputs for puzzle in puzzles])
    labels = np.concatenate([puzzle.labels for puzzle in puzzles])
    return Puzzles(
        _compact(torch.from_numpy(inputs), vocabulary),
        _compact(torch.from_numpy(labels), vocabulary),
        _starts(len(puzzle.inputs) for puzzle in puzzles),
        _starts(map(len, groups)),
        vocabulary,
    )


def _starts(counts: Iterable[int]) -> Indices:
    return np.cumsum([0, *counts], dtype=np.int64)


def _compact(tokens: Tensor, vocabulary: int) -> Tensor:
    return tokens.to(torch.uint8 if vocabulary <= 256 else torch.int32)
