"""The puzzles of a run, read from a dataset or generated, and the order of training on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.data.arrays import Integers
from lockstep.systems.hrm.data.build import source
from lockstep.systems.hrm.data.format import BLANK_IDENTIFIER, Puzzle, PuzzleSplit, read_dataset
from lockstep.systems.hrm.data.sources import OptionError, Options

_LEAST_BATCHES = 8
"""Batches of an epoch, at least; an incomplete last batch is dropped."""

_BLOCK_ROWS = 1 << 12
"""Examples that are copied at a time."""

_KEYS: Mapping[str, str] = {
    "train": "num_train",
    "test": "num_val",
    "version": "arc_version",
    "seed": "data_seed",
}
"""The config key of each option with another name."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Puzzles:
    """Examples of a split, by puzzle and by group.

    Attributes:
        inputs: tokens [N, length].
        labels: tokens [N, length]; 0 in cells without an answer.
        puzzles: int64 [P + 1]; puzzle p has the examples from `puzzles[p]` to `puzzles[p + 1]`.
        groups: int64 [G + 1]; group g, a puzzle and its augmentations, likewise.
        vocabulary: number of tokens.
        identifiers: int64 [P], of each puzzle.
        num_identifiers: number of identifiers in both splits together.
        blank: identifier of puzzles that have none.
        names: names of identifiers; empty if they are in a file.
    """

    inputs: Tensor
    labels: Tensor
    puzzles: Indices
    groups: Indices
    vocabulary: int
    identifiers: Indices
    num_identifiers: int
    blank: int = 0
    names: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of an example."""
        return self.inputs.shape[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all but identifiers."""
        sha = hashlib.sha256(f"{self.vocabulary} {self.inputs.dtype}".encode())
        for array in (self.inputs.numpy(), self.labels.numpy(), self.puzzles, self.groups):
            sha.update(array.tobytes())
        return sha.hexdigest()

    @cached_property
    def identified_digest(self) -> str:
        """SHA-256 of all, including identifiers but not their names."""
        sha = hashlib.sha256(f"{self.digest} {self.num_identifiers} {self.blank}".encode())
        sha.update(self.identifiers.tobytes())
        return sha.hexdigest()

    @property
    def example_identifiers(self) -> Indices:
        """The identifier of each example, int64 [N]."""
        return np.repeat(self.identifiers, np.diff(self.puzzles))

    def epoch(self, batch_size: int, generator: np.random.Generator) -> Indices:
        """Indices of the examples of an epoch: passes over all groups until some batches are full.

        As published, a pass takes a random puzzle of each group, with all of its examples, and the
        groups in random order.

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


def puzzles_of(config: HrmConfig) -> dict[str, Puzzles]:
    """The puzzles of a run, by split: `train` and `val`.

    Raises:
        ConfigError: there are no such puzzles.
        DataError: the dataset is missing or damaged.
    """
    if config.data_dir is not None:
        both = read_both(config.data_dir.expanduser())
    else:
        is_arc = config.puzzle == "arc"
        options = Options(
            None if is_arc else config.size,
            config.num_train,
            config.num_val,
            config.augment,
            config.data_seed,
            clues=config.clues if config.puzzle == "sudoku" else None,
            version=config.arc_version if is_arc else None,
        )
        try:
            both = generate(config.puzzle, options)
        except OptionError as error:
            key = _KEYS.get(error.option, error.option)
            raise ConfigError(f"{key}={error.value}: {error.problem}") from None
    return {"train": both["train"], "val": both["test"]}


def read_both(folder: Path) -> dict[str, Puzzles]:
    """Both splits of a dataset in the published format.

    Raises:
        DataError: one is missing or damaged, has more sets than one, or they do not fit together.
    """
    splits = read_dataset(folder).items()
    return {name: to_puzzles(folder / name, split) for name, split in splits}


def to_puzzles(path: Path, split: PuzzleSplit) -> Puzzles:
    """The puzzles of a split that is read from a folder.

    Raises:
        DataError: it has more sets than one.
    """
    if len(split.sets) != 1:
        names = ", ".join(split.sets)
        raise DataError(f"{path}: has the sets {names}; give a dataset with one")
    (examples,) = split.sets.values()
    metadata = split.metadata
    return Puzzles(
        _compact(examples.inputs, metadata.vocab_size),
        _compact(examples.labels, metadata.vocab_size, metadata.ignore_label_id),
        examples.puzzle_indices,
        examples.group_indices,
        metadata.vocab_size,
        examples.puzzle_identifiers,
        metadata.num_puzzle_identifiers,
        metadata.blank_identifier_id,
    )


def generate(kind: str, options: Options) -> dict[str, Puzzles]:
    """Puzzles of both splits, generated from a seed.

    Raises:
        ConfigError: an option does not belong to the kind, or a package is missing.
    """
    generated = source(kind, options)
    names = [BLANK_IDENTIFIER]

    def identifier(name: str) -> int:
        names.append(name)
        return len(names) - 1

    groups: dict[str, list[list[Puzzle]]] = {"train": [], "test": []}
    for split, group in generated.groups(identifier):
        groups[split].append(group)
    return {split: _joined(some, generated.vocab_size, names) for split, some in groups.items()}


def _joined(groups: list[list[Puzzle]], vocabulary: int, names: list[str]) -> Puzzles:
    puzzles = [puzzle for group in groups for puzzle in group]
    return Puzzles(
        _compact(np.concatenate([puzzle.inputs for puzzle in puzzles]), vocabulary),
        _compact(np.concatenate([puzzle.labels for puzzle in puzzles]), vocabulary),
        _starts(len(puzzle.inputs) for puzzle in puzzles),
        _starts(map(len, groups)),
        vocabulary,
        np.array([puzzle.identifier for puzzle in puzzles], np.int64),
        len(names),
        names=tuple(names),
    )


def _starts(counts: Iterable[int]) -> Indices:
    return np.cumsum([0, *counts], dtype=np.int64)


def _compact(tokens: Integers, vocabulary: int, ignored: int | None = None) -> Tensor:
    """Tokens in the smallest dtype that holds them, and 0 for ignored labels.

    Copied in blocks, so that no wider array is in memory as a whole.
    """
    compact = np.empty(tokens.shape, np.uint8 if vocabulary <= 256 else np.int32)
    for first in range(0, len(tokens), _BLOCK_ROWS):
        block = tokens[first : first + _BLOCK_ROWS]
        if ignored not in (None, 0):
            block = np.where(block == ignored, 0, block)
        compact[first : first + _BLOCK_ROWS] = block
    return torch.from_numpy(compact)
