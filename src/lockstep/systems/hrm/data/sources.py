"""Sources of puzzle datasets: what is requested, and pairs of grids out of public CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from lockstep.config.files import open_to_read
from lockstep.config.parsing import parse_int, shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.format import Puzzle

Group = tuple[str, list[Puzzle]]
"""A split, and a group of it."""

NewIdentifier = Callable[[str], int]
"""Takes the name of a new puzzle identifier; returns its number."""

DEFAULT_COUNT = 1000
"""Default number of puzzles of a split."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "question": ("q", "question"),
    "answer": ("a", "answer"),
    "rating": ("rating",),
}
"""Columns and their names in the public files; other columns, such as `source`, are ignored."""

_SPARE = 8
"""Puzzles to sample for each one that is requested: the test may get a quarter of them or less."""

_MOST_LINE_CHARS = 1 << 16

_OPTIONS: Mapping[str, frozenset[str]] = {
    "sudoku": frozenset({"size", "train", "test", "augment", "csv", "rating", "clues"}),
    "maze": frozenset({"size", "train", "test", "augment", "csv", "rating"}),
    "arc": frozenset({"train", "test", "augment", "version"}),
}
"""The options of each kind, beside the seed."""


class OptionError(ConfigError):
    """An option that has an invalid value, or does not belong to the kind.

    Attributes:
        option: its name, a field of `Options`.
        value: its value.
        problem: what is wrong with it.
    """

    def __init__(self, option: str, value: object, problem: str) -> None:
        super().__init__(f"--{option} {value}: {problem}")
        self.option, self.value, self.problem = option, value, problem


@dataclass(frozen=True)
class Options:
    """Options of a dataset; None stands for the default of its kind.

    Attributes:
        size: rows of a Sudoku (4, 6 or 9; 4 by default) or of a maze (30).
        train: number of training puzzles, or of ARC's training tasks.
        test: number of test puzzles, or of ARC's evaluation tasks.
        augment: augmentations of each training puzzle (of ARC: of each task).
        seed: seed of all draws, from 0 to 2^63 - 1.
        csv: a CSV file of the public form, or a folder with `train.csv` and `test.csv`.
        rating: lowest rating of puzzles.
        clues: number of clues to stop at when a Sudoku is generated; 0 for minimal ones.
        version: 1 or 2, of ARC-AGI.
    """

    size: int | None = None
    train: int | None = None
    test: int | None = None
    augment: int | None = None
    seed: int = 0
    csv: Path | None = None
    rating: int | None = None
    clues: int | None = None
    version: int | None = None

    def check(self, kind: str) -> None:
        """Check that these are options of a kind of dataset.

        Raises:
            ConfigError: there is no such kind, it has no such option, or a number is too small.
        """
        if kind not in _OPTIONS:
            raise ConfigError(f"kind {kind!r}: must be one of {', '.join(_OPTIONS)}")
        for name in (field.name for field in fields(self) if field.name != "seed"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in _OPTIONS[kind]:
                raise OptionError(name, value, f"is not for {kind}; leave it out")
            least = 1 if name in ("size", "train", "test") else 0
            if isinstance(value, int) and value < least:
                raise OptionError(name, value, f"must be at least {least}")
        if self.csv and self.clues is not None:
            raise ConfigError(f"--clues {self.clues}: is for puzzles that are made, not for --csv")
        if not 0 <= self.seed < 1 << 63:
            raise OptionError("seed", self.seed, "must be from 0 to 2^63 - 1")


@dataclass(frozen=True)
class Source:
    """A source of the groups of a dataset.

    Attributes:
        vocab_size: number of tokens, padding included.
        seq_len: tokens of an example.
        groups: yields the groups in order, given a function that numbers new identifiers.
    """

    vocab_size: int
    seq_len: int
    groups: Callable[[NewIdentifier], Iterator[Group]]


@dataclass(frozen=True)
class Pairs:
    """Questions and answers, both uint8 [n, length]."""

    questions: npt.NDArray[np.uint8]
    answers: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.questions)


Splits = Mapping[str, Iterable[Pairs]]
"""The puzzles of each split, one in each `Pairs`."""


def pair_source(
    vocab_size: int,
    seq_len: int,
    splits: Splits,
    seed: int,
    num_augment: int,
    augment: Callable[[Pairs, int, np.random.Generator], Iterable[Puzzle]],
) -> Source:
    """A source with a group for each pair; its puzzles have no identifiers of their own.

    Args:
        vocab_size: number of tokens, padding included.
        seq_len: tokens of an example.
        splits: the puzzles of each split.
        seed: seed of the augmentations.
        num_augment: number of augmentations of each training puzzle.
        augment: yields a puzzle and some augmentations of it.
    """

    def groups(_: NewIdentifier) -> Iterator[Group]:
        for split, pairs in splits.items():
            count = num_augment if split == "train" else 0
            for number, pair in enumerate(pairs):
                yield split, list(augment(pair, count, keyed(seed, Use.AUGMENT, number)))

    return Source(vocab_size, seq_len, groups)


def choose_pairs(
    options: Options,
    read: Callable[[Path], Iterator[Pairs]],
    divide: Callable[[Iterator[Pairs]], Iterator[tuple[str, Pairs]]],
) -> dict[str, list[Pairs]]:
    """The puzzles of both splits, sampled from CSV files, one in each `Pairs`.

    Args:
        options: numbers of puzzles, and the file; or the folder with `train.csv` and `test.csv`, of
            which all test puzzles are the default.
        read: reads a CSV file block by block.
        divide: assigns the puzzles of a single file, in random order, to splits; may drop some.

    Raises:
        DataError: a file is missing or damaged.
        ConfigError: there are fewer puzzles than requested.
    """
    assert options.csv
    num_train = options.train or DEFAULT_COUNT
    splits: dict[str, list[Pairs]] = {"train": [], "test": []}
    if options.csv.is_dir():
        for number, (split, count) in enumerate((("train", num_train), ("test", options.test))):
            path = options.csv / f"{split}.csv"
            pairs = sample(read(path), count, keyed(options.seed, Use.CHOICE, number))
            splits[split] += _singles(pairs)
            _check_count(path, split, splits[split], count or 1)
        return splits
    counts = {"train": num_train, "test": options.test or DEFAULT_COUNT}
    pool = _SPARE * sum(counts.values()) + DEFAULT_COUNT
    pairs = sample(read(options.csv), pool, keyed(options.seed, Use.CHOICE))
    for split, pair in divide(_singles(pairs)):
        if len(splits[split]) < counts[split]:
            splits[split].append(pair)
        if all(len(splits[name]) == count for name, count in counts.items()):
            break
    for split, count in counts.items():
        _check_count(options.csv, split, splits[split], count)
    return splits


def sample(blocks: Iterable[Pairs], count: int | None, generator: np.random.Generator) -> Pairs:
    """A random sample of pairs, in random order: those with the smallest random numbers.

    Args:
        blocks: all pairs, block by block, at least one.
        count: size of the sample; None for all. There may be fewer.
        generator: draws a number for each pair.
    """
    keys = np.empty(0, np.uint64)
    kept: list[Pairs] = []
    for block in blocks:
        drawn = generator.integers(1 << 63, size=len(block), dtype=np.uint64)
        keys = np.concatenate([keys, drawn])
        kept.append(block)
        if count is not None and len(keys) > 2 * count + (1 << 16):
            keys, kept = _smallest(keys, kept, count)
    _, kept = _smallest(keys, kept, len(keys) if count is None else count)
    return kept[0]


def _smallest(
    keys: npt.NDArray[np.uint64], kept: list[Pairs], count: int
) -> tuple[npt.NDArray[np.uint64], list[Pairs]]:
    order = np.argsort(keys, kind="stable")[:count]
    questions = np.concatenate([pairs.questions for pairs in kept])[order]
    answers = np.concatenate([pairs.answers for pairs in kept])[order]
    return keys[order], [Pairs(questions, answers)]


def _singles(pairs: Pairs) -> Iterator[Pairs]:
    for number in range(len(pairs)):
        one = slice(number, number + 1)
        yield Pairs(pairs.questions[one], pairs.answers[one])


def _check_count(path: Path, split: str, found: list[Pairs], count: int) -> None:
    if len(found) < count:
        raise ConfigError(
            f"--{split} {count}: {path} has no more than {len(found)} puzzles for it; ask for fewer"
        )


@dataclass(frozen=True)
class Row:
    """A row of a CSV file.

    Attributes:
        line: number of its (last) line in the file, from 1.
        question: the puzzle as text.
        answer: its solution as text.
        rating: its difficulty; 0 in a file without ratings.
    """

    line: int
    question: str
    answer: str
    rating: int


def read_rows(path: Path, *, least_rating: int = 0) -> Iterator[Row]:
    """The rows of a CSV file with the columns `q` and `a` (or `question`, `answer`), and `rating`.

    UTF-8, with or without a byte order mark, with any line ends; empty lines are skipped.

    Args:
        path: path of the file; links are followed.
        least_rating: rows of a lower rating are left out.

    Raises:
        DataError: the file is missing, has no such columns, or a row does not fit; with its line.
    """
    with _opened(path) as file:
        reader = csv.reader(_lines(path, file), strict=True)
        columns: dict[str, int] = {}
        width = 0
        try:
            for texts in reader:
                if not texts:
                    continue
                if not columns:
                    columns, width = _columns(path, texts, least_rating), len(texts)
                    continue
                row = _row(path, reader.line_num, texts, columns, width)
                if row.rating >= least_rating:
                    yield row
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num}: is no CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: line {reader.line_num + 1} or later: is not UTF-8 ({error.reason})"
            ) from None
    if not columns:
        raise DataError(f"{path}: is empty; it must begin with a line of column names")


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with open_to_read(path, follow_links=True) as binary:
            yield TextIOWrapper(binary, encoding="utf-8-sig", newline="")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file, of bounded length: a damaged file may have no line ends at all."""
    number = 0
    while line := file.readline(_MOST_LINE_CHARS):
        number += 1
        if len(line) == _MOST_LINE_CHARS:
            raise DataError(
                f"{path}: line {number}: is longer than {_MOST_LINE_CHARS:,} characters"
            )
        yield line


def _columns(path: Path, header: Sequence[str], least_rating: int) -> dict[str, int]:
    """The index of each column."""
    names = [name.strip().lower() for name in header]
    columns = {
        column: names.index(spelling)
        for column, spellings in COLUMNS.items()
        for spelling in spellings
        if names.count(spelling) == 1
    }
    for column in ("question", "answer", "rating")[: 3 if least_rating else 2]:
        if column not in columns:
            raise DataError(
                f"{path}: columns {shown(names)}: one of them must be "
                f"{' or '.join(COLUMNS[column])}, once"
            )
    return columns


def _row(
    path: Path, line: int, texts: Sequence[str], columns: Mapping[str, int], width: int
) -> Row:
    if len(texts) != width:
        raise DataError(f"{path}: line {line}: {len(texts)} columns: must be {width}")
    rating = 0
    if "rating" in columns:
        try:
            rating = parse_int(texts[columns["rating"]])
        except ValueError as error:
            raise DataError(f"{path}: line {line}: rating: {error}") from None
    return Row(line, texts[columns["question"]], texts[columns["answer"]], rating)
