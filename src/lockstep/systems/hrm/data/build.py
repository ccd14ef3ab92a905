"""Builds datasets and writes them: the same bytes from the same options, in any process.

(With one version of NumPy: the methods of its generators may draw other numbers in another one.) A
dataset is written group by group, and appears as a whole or not at all.

What training may see of the test:

- Sudokus that are generated, or read from one CSV file: no solution of the test occurs in training,
  nor any symmetric one (`sudoku_board.py`).
- Mazes that are generated, or read from one CSV file: no maze is in both, nor turned or mirrored.
- A folder with `train.csv` and `test.csv`: the split is that of the files, as it was published.
- ARC, as published: training has all pairs of the training tasks, and the demonstrations of the
  evaluation tasks; the test has the test questions of the evaluation tasks, and of their
  augmentations for the vote. So a model learns an evaluation task's identifier from its
  demonstrations, and its answers are nowhere in training; but the test pair of 070dd51e (version
  1) is also a pair of a training task in the published data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lockstep.config.files import open_to_read, replacing, sync_folder, temporary_beside
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arc import arc_source
from lockstep.systems.hrm.data.arrays import IntegersFile
from lockstep.systems.hrm.data.format import (
    ARRAYS,
    BLANK_IDENTIFIER,
    IDENTIFIERS_FILE,
    METADATA_FILE,
    SPLITS,
    Metadata,
    Puzzle,
    array_name,
)
from lockstep.systems.hrm.data.maze import maze_source
from lockstep.systems.hrm.data.sources import Options, Source
from lockstep.systems.hrm.data.sudoku import sudoku_source

_SOURCES: Mapping[str, Callable[[Options], Source]] = {
    "sudoku": sudoku_source,
    "maze": maze_source,
    "arc": arc_source,
}


@dataclass(frozen=True)
class Built:
    """A dataset that has been written.

    Attributes:
        folder: folder of the dataset.
        vocab_size: number of tokens.
        seq_len: tokens of an example.
        num_identifiers: number of puzzle identifiers, the blank one included.
        sizes: size of each split.
    """

    folder: Path
    vocab_size: int
    seq_len: int
    num_identifiers: int
    sizes: Mapping[str, SplitSize]


def source(kind: str, options: Options) -> Source:
    """The source of a dataset's groups.

    Raises:
        ConfigError: an option is invalid, or a package is missing.
        DataError: a CSV file is missing or damaged.
    """
    options.check(kind)
    return _SOURCES[kind](options)


def build(kind: str, folder: Path, options: Options, *, overwrite: bool = False) -> Built:
    """Write a dataset; see `format` and `new_dataset`.

    Args:
        kind: `sudoku`, `maze` or `arc`.
        folder: folder of the dataset.
        options: options of the dataset.
        overwrite: whether a dataset of other content may be replaced.

    Raises:
        ConfigError: an option is invalid, or a package is missing.
        DataError: a CSV file is missing or damaged; the folder holds something else; or it cannot
            be written.
    """
    groups = source(kind, options)
    with new_dataset(folder, groups.vocab_size, groups.seq_len, overwrite=overwrite) as writer:
        for split, group in groups.groups(writer.identifier):
            writer.add(split, group)
    num_identifiers = len(writer.identifiers)
    return Built(folder, groups.vocab_size, groups.seq_len, num_identifiers, writer.sizes)


SET = "all"
"""The name of the one set of each split that is written."""

PAD_ID = 0
"""Token of padding, and the label that does not count."""

_BLOCK_BYTES = 1 << 20
_OWN_FILE = re.compile(
    rf"{re.escape(IDENTIFIERS_FILE)}|({'|'.join(SPLITS)})"
    rf"(/({re.escape(METADATA_FILE)}|[^/]+__({'|'.join(ARRAYS)})\.npy))?"
)


@dataclass(frozen=True)
class SplitSize:
    """The size of a split."""

    num_groups: int
    num_puzzles: int
    num_examples: int


class SplitWriter:
    """Writes the files of a split; groups are appended."""

    def __init__(self, folder: Path, vocab_size: int, seq_len: int, stack: ExitStack) -> None:
        """Create the folder and empty files, which `stack` closes.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir()
        self._folder, self._vocab_size, self._seq_len = folder, vocab_size, seq_len
        self._files = {}
        for name in ARRAYS:
            path = folder / array_name(SET, name)
            if name in ("inputs", "labels"):
                file = IntegersFile(path, np.min_scalar_type(vocab_size - 1), (seq_len,))
            else:
                file = IntegersFile(path, np.int32)
            self._files[name] = stack.enter_context(file)
        for name in ("puzzle_indices", "group_indices"):
            self._files[name].append([0])

    def add(self, group: Sequence[Puzzle]) -> None:
        """Append a group: an original and its augmentations, at least one puzzle.

        Raises:
            OSError: it cannot be written.
        """
        assert group
        assert all(len(puzzle.inputs) == len(puzzle.labels) > 0 for puzzle in group)
        ends = self._files["inputs"].num_rows + np.cumsum([len(p.inputs) for p in group])
        self._files["inputs"].append(np.concatenate([puzzle.inputs for puzzle in group]))
        self._files["labels"].append(np.concatenate([puzzle.labels for puzzle in group]))
        self._files["puzzle_identifiers"].append([puzzle.identifier for puzzle in group])
        self._files["puzzle_indices"].append(ends)
        self._files["group_indices"].append([self._files["puzzle_identifiers"].num_rows])

    @property
    def size(self) -> SplitSize:
        """The size of what has been appended."""
        return SplitSize(
            self._files["group_indices"].num_rows - 1,
            self._files["puzzle_identifiers"].num_rows,
            self._files["inputs"].num_rows,
        )

    def write_metadata(self, num_identifiers: int) -> None:
        """Write `dataset.json`.

        Raises:
            DataError: the split has no groups.
            OSError: something cannot be written.
        """
        size = self.size
        if not size.num_groups:
            raise DataError(f"{self._folder.name}: has no puzzles; ask for at least one")
        metadata = Metadata(
            pad_id=PAD_ID,
            ignore_label_id=PAD_ID,
            blank_identifier_id=0,
            vocab_size=self._vocab_size,
            seq_len=self._seq_len,
            num_puzzle_identifiers=num_identifiers,
            total_groups=size.num_groups,
            mean_puzzle_examples=size.num_examples / size.num_puzzles,
            sets=(SET,),
        )
        _write_json(self._folder / METADATA_FILE, asdict(metadata))


class DatasetWriter:
    """Writes both splits of a dataset.

    Attributes:
        identifiers: names of puzzle identifiers so far; the first one is no puzzle's.
    """

    def __init__(self, folder: Path, vocab_size: int, seq_len: int, stack: ExitStack) -> None:
        """Create both splits, see `SplitWriter`."""
        self.identifiers = [BLANK_IDENTIFIER]
        self._splits = {
            split: SplitWriter(folder / split, vocab_size, seq_len, stack) for split in SPLITS
        }

    def add(self, split: str, group: Sequence[Puzzle]) -> None:
        """Append a group to `train` or `test`; see `SplitWriter.add`."""
        self._splits[split].add(group)

    def identifier(self, name: str) -> int:
        """The number of a new identifier."""
        self.identifiers.append(name)
        return len(self.identifiers) - 1

    @property
    def sizes(self) -> dict[str, SplitSize]:
        """The size of each split."""
        return {split: writer.size for split, writer in self._splits.items()}

    def write_metadata(self, folder: Path) -> None:
        """Write the names of identifiers, and `dataset.json` of each split."""
        for writer in self._splits.values():
            writer.write_metadata(len(self.identifiers))
        _write_json(folder / IDENTIFIERS_FILE, self.identifiers)


@contextmanager
def new_dataset(
    folder: Path, vocab_size: int, seq_len: int, *, overwrite: bool = False
) -> Iterator[DatasetWriter]:
    """A writer of a dataset that replaces `folder` at the end, or leaves it unchanged on errors.

    It is written to a hidden folder beside `folder`, which stays if it has the same content
    already. Replacing another dataset takes two renames: a process that is killed between them
    leaves the old dataset under a hidden name beside, `.<name>.<random>.tmp`.

    Args:
        folder: folder of the dataset; the folder above it is created if need be.
        vocab_size: number of tokens, padding included.
        seq_len: tokens of an example.
        overwrite: whether a dataset of other content may be replaced.

    Raises:
        DataError: the folder holds something else than a dataset, or another dataset and
            `overwrite` is not set; a split has no puzzles; or something cannot be written.
    """
    target = Path(os.path.abspath(folder)).resolve()
    temporary = temporary_beside(target)
    try:
        # Checked before the work too, which may take an hour.
        _check_own(target, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        with ExitStack() as stack:
            writer = DatasetWriter(temporary, vocab_size, seq_len, stack)
            yield writer
            writer.write_metadata(temporary)
        for written in (*(temporary / split for split in SPLITS), temporary):
            sync_folder(written)
        _move(temporary, target, folder, overwrite)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def content_digest(folder: Path) -> str:
    """SHA-256 of all files below a folder, their names included.

    Raises:
        OSError: a file cannot be read.
    """
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            sha.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
            with open_to_read(path, follow_links=True) as file:
                while block := file.read(_BLOCK_BYTES):
                    sha.update(block)
    return sha.hexdigest()


def _move(temporary: Path, target: Path, folder: Path, overwrite: bool) -> None:
    """Rename a finished dataset, unless its target has the same content already."""
    _check_own(target, folder)
    old = temporary_beside(target)
    if target.exists() and any(target.iterdir()):
        if content_digest(target) == content_digest(temporary):
            return
        if not overwrite:
            raise DataError(
                f"{folder}: holds another dataset; choose another folder, or --overwrite"
            )
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_own(target: Path, folder: Path) -> None:
    """Check that a folder holds nothing but a dataset, since replacing it deletes its files.

    Raises:
        DataError: it holds other files, or there is a file where a folder must be.
    """
    for parent in Path(folder).parents:
        if parent.exists() and not parent.is_dir():
            raise DataError(f"{folder}: {parent} is a file; give a folder that can be made")
    if target.exists() and not target.is_dir():
        raise DataError(f"{folder}: is a file; give a folder")
    for path in target.rglob("*"):
        name = path.relative_to(target).as_posix()
        if not _OWN_FILE.fullmatch(name):
            raise DataError(
                f"{folder}: holds {name}, which is no part of a dataset; choose another folder"
            )


def _write_json(path: Path, value: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1) + "\n")
