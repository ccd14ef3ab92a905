"""Writing datasets of puzzles group by group: all of a dataset appears at once, or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lockstep.config.files import open_to_read, replacing, sync_folder, temporary_beside
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arrays import Integers, IntegersFile
from lockstep.systems.hrm.data.format import (
    ARRAYS,
    IDENTIFIERS_FILE,
    METADATA_FILE,
    SPLITS,
    Metadata,
    array_name,
)

SET = "all"
"""The name of the one set of each split that is written."""

PAD_ID = 0
"""Token of padding, and the label that does not count."""

BLANK_IDENTIFIER = "<blank>"
"""Name of identifier 0, of puzzles that have none of their own."""

_BLOCK_BYTES = 1 << 20
_OWN_FILE = re.compile(
    rf"{re.escape(IDENTIFIERS_FILE)}|({'|'.join(SPLITS)})"
    rf"(/({re.escape(METADATA_FILE)}|[^/]+__({'|'.join(ARRAYS)})\.npy))?"
)


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: an identifier, and examples of what it asks.

    Attributes:
        identifier: number of its identifier; 0 if it has none of its own.
        inputs: tokens [n, seq_len], n of at least 1.
        labels: tokens [n, seq_len]; 0 where there is nothing to answer.
    """

    identifier: int
    inputs: Integers
    labels: Integers


@dataclass(frozen=True)
class SplitSize:
    """How much a split holds."""

    num_groups: int
    num_puzzles: int
    num_examples: int


class SplitWriter:
    """Writes the files of a split; groups are appended."""

    def __init__(self, folder: Path, vocab_size: int, seq_len: int) -> None:
        """Make the folder and empty files.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir()
        self._folder, self._vocab_size, self._seq_len = folder, vocab_size, seq_len
        tokens = np.min_scalar_type(vocab_size - 1)
        with ExitStack() as stack:
            self._files = {
                name: stack.enter_context(
                    IntegersFile(
                        folder / array_name(SET, name),
                        tokens if name in ("inputs", "labels") else np.int32,
                        (seq_len,) if name in ("inputs", "labels") else (),
                    )
                )
                for name in ARRAYS
            }
            for name in ("puzzle_indices", "group_indices"):
                self._files[name].append([0])
            self._closing = stack.pop_all()

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
        """What has been appended."""
        return SplitSize(
            self._files["group_indices"].num_rows - 1,
            self._files["puzzle_identifiers"].num_rows,
            self._files["inputs"].num_rows,
        )

    def finish(self, num_identifiers: int) -> None:
        """Close the arrays and write `dataset.json`.

        Raises:
            DataError: the split has no groups.
            OSError: something cannot be written.
        """
        size = self.size
        if not size.num_groups:
            raise DataError(f"{self._folder.name}: has no puzzles; ask for at least one")
        self._closing.close()
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
        sync_folder(self._folder)

    def give_up(self, error: BaseException) -> None:
        """Close the files as they are; nobody can read them."""
        self._closing.__exit__(type(error), error, None)


class DatasetWriter:
    """Writes both splits of a dataset.

    Attributes:
        identifiers: names of puzzle identifiers so far; the first is that of no puzzle.
    """

    def __init__(self, folder: Path, vocab_size: int, seq_len: int) -> None:
        """As `new_dataset`, which makes it."""
        self.identifiers = [BLANK_IDENTIFIER]
        self._folder = folder
        self._splits: dict[str, SplitWriter] = {}
        for split in SPLITS:
            self._splits[split] = SplitWriter(folder / split, vocab_size, seq_len)

    def add(self, split: str, group: Sequence[Puzzle]) -> None:
        """Append a group to `train` or `test`; see `SplitWriter.add`."""
        self._splits[split].add(group)

    def identifier(self, name: str) -> int:
        """A new identifier's number; the name tells what it stands for."""
        self.identifiers.append(name)
        return len(self.identifiers) - 1

    @property
    def sizes(self) -> dict[str, SplitSize]:
        """What has been written, by split."""
        return {split: writer.size for split, writer in self._splits.items()}

    def finish(self) -> None:
        """Write what is left; see `SplitWriter.finish`."""
        for writer in self._splits.values():
            writer.finish(len(self.identifiers))
        _write_json(self._folder / IDENTIFIERS_FILE, self.identifiers)

    def give_up(self, error: BaseException) -> None:
        """Close all files as they are."""
        for writer in self._splits.values():
            writer.give_up(error)


@contextmanager
def new_dataset(
    folder: Path, vocab_size: int, seq_len: int, *, overwrite: bool = False
) -> Iterator[DatasetWriter]:
    """A dataset that takes the place of `folder` at the end, or leaves all as it was.

    It is written to a hidden folder beside. If `folder` has the same content already, it stays.
    Replacing another one takes two renames: whoever is killed between them leaves the old dataset
    under a hidden name beside, `.<name>.<random>.tmp`.

    Args:
        folder: folder of the dataset; the folder above it is created if need be.
        vocab_size: number of tokens, padding included.
        seq_len: tokens of an example.
        overwrite: whether a dataset of other content may be replaced.

    Raises:
        DataError: the folder holds something else than a dataset, or another dataset and
            `overwrite` is not set; a split has no puzzles; or something cannot be written.
    """
    place = Path(os.path.abspath(folder)).resolve()
    temporary = temporary_beside(place)
    try:
        # Asked before the work too: it may take an hour.
        _check_own(place, folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        writer = DatasetWriter(temporary, vocab_size, seq_len)
        try:
            yield writer
            writer.finish()
        except BaseException as error:
            writer.give_up(error)
            raise
        sync_folder(temporary)
        _put(temporary, place, folder, overwrite)
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
        if path.is_dir():
            continue
        sha.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with open_to_read(path, follow_links=True) as file:
            while block := file.read(_BLOCK_BYTES):
                sha.update(block)
    return sha.hexdigest()


def _put(temporary: Path, place: Path, folder: Path, overwrite: bool) -> None:
    """Give a finished dataset its name."""
    _check_own(place, folder)
    old = temporary_beside(place)
    if place.exists() and any(place.iterdir()):
        if content_digest(place) == content_digest(temporary):
            return
        if not overwrite:
            raise DataError(
                f"{folder}: holds another dataset; choose another folder, or --overwrite"
            )
        place.rename(old)
    try:
        temporary.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    sync_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_own(place: Path, folder: Path) -> None:
    """There is nothing that is not a dataset's: what is overwritten is deleted.

    Raises:
        DataError: there is, or a file where a folder must be.
    """
    for parent in Path(folder).parents:
        if parent.exists() and not parent.is_dir():
            raise DataError(f"{folder}: {parent} is a file; give a folder that can be made")
    if not place.exists():
        return
    if not place.is_dir():
        raise DataError(f"{folder}: is a file; give a folder")
    for path in place.rglob("*"):
        name = path.relative_to(place).as_posix()
        if not _OWN_FILE.fullmatch(name):
            raise DataError(
                f"{folder}: holds {name}, which is no part of a dataset; choose another folder"
            )


def _write_json(path: Path, value: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1) + "\n")
