"""The format of puzzle datasets on disk, as published with the hierarchical reasoning model.

    <folder>/identifiers.json                      names of puzzle identifiers, a list
    <folder>/{train,test}/dataset.json             `Metadata`
    <folder>/{train,test}/<set>__inputs.npy        tokens [N, seq_len]
                          <set>__labels.npy        tokens [N, seq_len]
                          <set>__puzzle_identifiers.npy  [P]
                          <set>__puzzle_indices.npy      [P+1]: examples of a puzzle
                          <set>__group_indices.npy       [G+1]: puzzles of a group

A group is an original and its augmentations; a puzzle has one identifier and at least one example.
Labels equal to `ignore_label_id` (0, which is padding, in the published datasets) do not count; a
loader maps them to what its loss ignores.

Published arrays are int64 and int32; any integer dtype is read. Written tokens take one byte where
the vocabulary allows, which readers of the published format accept as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.files import MAX_TEXT_BYTES, read_bytes
from lockstep.config.parsing import as_type, parse_json, parse_object, shown
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arrays import Integers, read_integers

SPLITS = ("train", "test")
"""The folders of a dataset."""

METADATA_FILE = "dataset.json"
IDENTIFIERS_FILE = "identifiers.json"
BLANK_IDENTIFIER = "<blank>"
"""Name of identifier 0, of puzzles that have none of their own."""
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
"""The arrays of a set, each in `<set>__<array>.npy`."""

_SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MOST_IDENTIFIER_BYTES = 16 * MAX_TEXT_BYTES
"""A million names of forty characters are 40 MB."""

_BLOCK_VALUES = 1 << 22
"""Values that are checked at a time: an array may be larger than memory."""


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: an identifier, and examples.

    Attributes:
        identifier: number of its identifier; 0 if it has none of its own.
        inputs: tokens [n, seq_len], n of at least 1.
        labels: tokens [n, seq_len]; 0 in cells without an answer.
    """

    identifier: int
    inputs: Integers
    labels: Integers


@dataclass(frozen=True)
class Metadata:
    """The content of `dataset.json`, about a split.

    Attributes:
        pad_id: token of padding.
        ignore_label_id: label that does not count; None if all labels count.
        blank_identifier_id: identifier of puzzles that have none.
        vocab_size: number of tokens; they are 0..vocab_size-1.
        seq_len: tokens of an example.
        num_puzzle_identifiers: number of puzzle identifiers, the blank one included.
        total_groups: number of groups in all sets together.
        mean_puzzle_examples: mean number of examples of a puzzle.
        sets: names of the sets; `all` in the published datasets.
    """

    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    sets: tuple[str, ...]


@dataclass(frozen=True)
class PuzzleSet:
    """Examples, by puzzle and by group.

    Attributes:
        inputs: tokens [N, seq_len], as stored, mapped into memory.
        labels: tokens [N, seq_len], as stored, mapped into memory.
        puzzle_identifiers: int64 [P].
        puzzle_indices: int64 [P+1]; puzzle p has the examples from the p-th index to before the
            next one.
        group_indices: int64 [G+1]; group g has the puzzles from the g-th index to before the next
            one.
    """

    inputs: Integers
    labels: Integers
    puzzle_identifiers: npt.NDArray[np.int64]
    puzzle_indices: npt.NDArray[np.int64]
    group_indices: npt.NDArray[np.int64]


@dataclass(frozen=True)
class PuzzleSplit:
    """A split: its metadata, and its sets by name."""

    metadata: Metadata
    sets: Mapping[str, PuzzleSet]


def array_name(set_name: str, array: str) -> str:
    """The name of an array's file."""
    return f"{set_name}__{array}.npy"


def read_split(folder: Path, split: str) -> PuzzleSplit:
    """A split of a dataset, checked completely.

    All tokens are checked; arrays stay on the disk, and only the indices take memory.

    Args:
        folder: folder of the dataset.
        split: `train` or `test`.

    Raises:
        DataError: a file is missing, damaged or inconsistent; names file, field and value.
    """
    path = Path(folder) / split / METADATA_FILE
    metadata = _read_metadata(path)
    sets = {name: _read_set(path.parent, name, metadata) for name in metadata.sets}
    num_groups = sum(len(found.group_indices) - 1 for found in sets.values())
    if num_groups != metadata.total_groups:
        raise DataError(
            f"{path}: total_groups={metadata.total_groups}: the sets have {num_groups} groups"
        )
    num_puzzles = sum(len(found.puzzle_identifiers) for found in sets.values())
    mean = sum(len(found.inputs) for found in sets.values()) / num_puzzles
    if not math.isclose(metadata.mean_puzzle_examples, mean, rel_tol=1e-4):
        raise DataError(
            f"{path}: mean_puzzle_examples={metadata.mean_puzzle_examples}: the sets have {mean} "
            "examples for each puzzle"
        )
    return PuzzleSplit(metadata, sets)


def read_identifiers(folder: Path) -> list[str]:
    """The names of puzzle identifiers, in order; the first one is no puzzle's.

    Raises:
        DataError: the file is missing or is not a list of strings.
    """
    path = Path(folder) / IDENTIFIERS_FILE
    try:
        return as_type(list[str], parse_json(_content(path, _MOST_IDENTIFIER_BYTES)))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: {error}; must be a list of names") from None


def read_dataset(folder: Path) -> dict[str, PuzzleSplit]:
    """Both splits of a dataset, which must be of the same kind.

    Raises:
        DataError: as `read_split`, or the splits differ in vocabulary, length or identifiers.
    """
    splits = {split: read_split(folder, split) for split in SPLITS}
    train, test = (splits[split].metadata for split in SPLITS)
    for name in ("vocab_size", "seq_len", "num_puzzle_identifiers", "pad_id", "ignore_label_id"):
        ours, theirs = getattr(train, name), getattr(test, name)
        if ours != theirs:
            raise DataError(f"{folder}: {name}: is {ours} in train, {theirs} in test")
    return splits


def _content(path: Path, limit: int) -> bytes:
    try:
        return read_bytes(path, limit, follow_links=True)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; is it the folder of a dataset?") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_metadata(path: Path) -> Metadata:
    try:
        values = parse_object(_content(path, MAX_TEXT_BYTES))
        # Other writers add keys of their own, such as `total_puzzles`.
        known = {field.name for field in fields(Metadata)}
        metadata = as_type(Metadata, {k: v for k, v in values.items() if k in known})
        _check_metadata(metadata)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return metadata


def _check_metadata(metadata: Metadata) -> None:
    """Raises `ValueError` for an impossible value."""
    for name, least, most in (
        ("vocab_size", 1, 1 << 31),
        ("seq_len", 1, 1 << 31),
        ("num_puzzle_identifiers", 1, 1 << 62),
        ("total_groups", 1, 1 << 62),
        ("pad_id", 0, metadata.vocab_size - 1),
        ("blank_identifier_id", 0, metadata.num_puzzle_identifiers - 1),
    ):
        value = getattr(metadata, name)
        if not least <= value <= most:
            raise ValueError(f"{name}={shown(value)}: must be from {least} to {most}")
    ignored = metadata.ignore_label_id
    if ignored is not None and not -(1 << 31) <= ignored < 1 << 31:
        raise ValueError(f"ignore_label_id={shown(ignored)}: must be a 32-bit number")
    mean = metadata.mean_puzzle_examples
    if not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"mean_puzzle_examples={mean}: must be a number more than 0")
    if not metadata.sets or len(set(metadata.sets)) < len(metadata.sets):
        raise ValueError(f"sets={shown(metadata.sets)}: must be names, each once")
    for name in metadata.sets:
        if not _SET_NAME.fullmatch(name):
            raise ValueError(f"sets: {shown(name)}: must be of letters, digits, '_', '-' and '.'")


def _read_set(folder: Path, name: str, metadata: Metadata) -> PuzzleSet:
    paths = {array: folder / array_name(name, array) for array in ARRAYS}
    found = {array: read_integers(path) for array, path in paths.items()}
    for array in ("inputs", "labels"):
        shape, path = found[array].shape, paths[array]
        if len(shape) != 2 or shape[0] < 1 or shape[1] != metadata.seq_len:
            raise DataError(f"{path}: shape={shape}: must be [N, {metadata.seq_len}] (seq_len)")
        ignored = metadata.ignore_label_id if array == "labels" else None
        _check_tokens(path, found[array], metadata.vocab_size, ignored)
    if len(found["labels"]) != len(found["inputs"]):
        raise DataError(
            f"{paths['labels']}: {len(found['labels'])} rows: {paths['inputs'].name} has "
            f"{len(found['inputs'])}"
        )
    identifiers = _indices(paths["puzzle_identifiers"], found["puzzle_identifiers"])
    _check_range(paths["puzzle_identifiers"], identifiers, metadata.num_puzzle_identifiers)
    puzzles = _indices(paths["puzzle_indices"], found["puzzle_indices"])
    _check_indices(paths["puzzle_indices"], puzzles, len(found["inputs"]), "examples")
    if len(puzzles) != len(identifiers) + 1:
        raise DataError(
            f"{paths['puzzle_indices']}: {len(puzzles)} numbers: must be one more than the "
            f"{len(identifiers)} of {paths['puzzle_identifiers'].name}"
        )
    groups = _indices(paths["group_indices"], found["group_indices"])
    _check_indices(paths["group_indices"], groups, len(identifiers), "puzzles")
    return PuzzleSet(found["inputs"], found["labels"], identifiers, puzzles, groups)


def _indices(path: Path, values: Integers) -> npt.NDArray[np.int64]:
    if values.ndim != 1 or not len(values):
        raise DataError(f"{path}: shape={values.shape}: must be [n], with n of at least 1")
    if int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: {int(values.max())}: is more than any index can be")
    return np.array(values, np.int64)


def _check_tokens(path: Path, tokens: Integers, vocab_size: int, ignored: int | None) -> None:
    rows = max(1, _BLOCK_VALUES // tokens.shape[1])
    for start in range(0, len(tokens), rows):
        block = tokens[start : start + rows]
        if int(block.min()) >= 0 and int(block.max()) < vocab_size:
            continue
        wrong = (block < 0) | (block > vocab_size - 1)
        if ignored is not None:
            wrong &= block != ignored
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise DataError(
                f"{path}: row {start + row}, column {column}: token {int(block[row, column])}: "
                f"must be from 0 to {vocab_size - 1} (vocab_size)"
            )


def _check_range(path: Path, values: npt.NDArray[np.int64], bound: int) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= bound))
    if len(wrong):
        raise DataError(
            f"{path}: number {wrong[0]}: {values[wrong[0]]}: must be from 0 to {bound - 1}"
        )


def _check_indices(path: Path, values: npt.NDArray[np.int64], end: int, counted: str) -> None:
    """Indices increase from 0 to the number of `counted` they point at."""
    # Compared, not subtracted: a difference of two int64 may overflow.
    wrong = np.flatnonzero(values[1:] <= values[:-1])
    if len(wrong):
        number = int(wrong[0]) + 1
        raise DataError(
            f"{path}: number {number}: {values[number]}: must be more than the one before, "
            f"{values[number - 1]}"
        )
    if values[0] != 0 or values[-1] != end:
        raise DataError(
            f"{path}: from {values[0]} to {values[-1]}: must be from 0 to {end}, the number of "
            f"{counted}"
        )
