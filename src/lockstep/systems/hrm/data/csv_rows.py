"""Puzzles of CSV files that come from others: rows with errors by line, and choosing among them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from lockstep.config.files import open_to_read
from lockstep.config.parsing import parse_int, shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.request import Options, asked

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "question": ("q", "question"),
    "answer": ("a", "answer"),
    "rating": ("rating",),
}
"""Columns and their names in the public files; `source` and others are passed over."""

_MOST_LINE_CHARS = 1 << 16


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        line: number of its (last) line in the file, from 1.
        question: the puzzle as text.
        answer: its solution as text.
        rating: how difficult it is; 0 if the file does not say it.
    """

    line: int
    question: str
    answer: str
    rating: int


def read_rows(path: Path, *, least_rating: int = 0) -> Iterator[Row]:
    """The rows of a CSV file with the columns `q` and `a` (or `question`, `answer`), and `rating`.

    UTF-8, with or without a byte order mark, with any line ends; empty lines are passed over.

    Args:
        path: path of the file; links are followed.
        least_rating: rows of a lower rating are left out.

    Raises:
        DataError: the file is missing, has no such columns, or a row does not fit; with its line.
    """
    with _opened(path) as file:
        reader = csv.reader(_lines(path, file), strict=True)
        places: dict[str, int] = {}
        width = 0
        try:
            for fields in reader:
                if not fields:
                    continue
                if not places:
                    places, width = _places(path, fields, least_rating), len(fields)
                    continue
                row = _row(path, reader.line_num, fields, places, width)
                if row.rating >= least_rating:
                    yield row
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num}: is no CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: line {reader.line_num + 1} or later: is not UTF-8 ({error.reason})"
            ) from None
    if not places:
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
    """Lines of a bounded length, whatever the file is."""
    number = 0
    while line := file.readline(_MOST_LINE_CHARS):
        number += 1
        if len(line) == _MOST_LINE_CHARS:
            raise DataError(
                f"{path}: line {number}: is longer than {_MOST_LINE_CHARS:,} characters"
            )
        yield line


def _places(path: Path, header: Sequence[str], least_rating: int) -> dict[str, int]:
    names = [name.strip().lower() for name in header]
    places = {
        column: names.index(spelling)
        for column, spellings in COLUMNS.items()
        for spelling in spellings
        if names.count(spelling) == 1
    }
    needed = ["question", "answer", *(["rating"] if least_rating else [])]
    for column in needed:
        if column not in places:
            raise DataError(
                f"{path}: columns {shown(names)}: one of them must be "
                f"{' or '.join(COLUMNS[column])}, once"
            )
    return places


def _row(
    path: Path, line: int, fields: Sequence[str], places: Mapping[str, int], width: int
) -> Row:
    if len(fields) != width:
        raise DataError(f"{path}: line {line}: {len(fields)} columns: must be {width}")
    rating = 0
    if "rating" in places:
        try:
            rating = parse_int(fields[places["rating"]])
        except ValueError as error:
            raise DataError(f"{path}: line {line}: rating: {error}") from None
    return Row(line, fields[places["question"]], fields[places["answer"]], rating)


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Pairs:
    """Questions and answers, both uint8 [n, length]."""

    questions: Bytes
    answers: Bytes

    def __len__(self) -> int:
        return len(self.questions)


def sample(blocks: Iterable[Pairs], count: int | None, generator: np.random.Generator) -> Pairs:
    """Some of all pairs, in random order: those with the least random numbers.

    Args:
        blocks: all pairs, block by block, at least one.
        count: how many to choose; None for all. There may be fewer.
        generator: draws a number for each pair.
    """
    keys = np.empty(0, np.uint64)
    kept: list[Pairs] = []
    for block in blocks:
        drawn = generator.integers(1 << 63, size=len(block), dtype=np.uint64)
        keys = np.concatenate([keys, drawn])
        kept.append(block)
        if count is not None and len(keys) > 2 * count + (1 << 16):
            keys, kept = _least(keys, kept, count)
    keys, kept = _least(keys, kept, len(keys) if count is None else count)
    return kept[0]


def _least(
    keys: npt.NDArray[np.uint64], kept: list[Pairs], count: int
) -> tuple[npt.NDArray[np.uint64], list[Pairs]]:
    order = np.argsort(keys, kind="stable")[:count]
    questions = np.concatenate([pairs.questions for pairs in kept])[order]
    answers = np.concatenate([pairs.answers for pairs in kept])[order]
    return keys[order], [Pairs(questions, answers)]


Reads = Callable[[Path], Iterator[Pairs]]
"""Reads a CSV file, block by block."""

Divides = Callable[[Iterator[Pairs]], Iterator[tuple[str, Pairs]]]
"""Gives the split of each puzzle of one file; may leave some out."""

DEFAULT_COUNT = 1000
"""Puzzles of a split, if it is not said how many."""

_SPARE = 8
"""Puzzles that are chosen for each one that is wanted: a quarter or less may be for the test."""


def chosen(options: Options, read: Reads, divide: Divides) -> dict[str, list[Pairs]]:
    """The puzzles of both splits, chosen at random, one in each `Pairs`.

    Args:
        options: says how many, and the file; or the folder with `train.csv` and `test.csv`, of
            whose test all puzzles are taken by default.
        read: reads a file.
        divide: divides the puzzles of a single file, which come in random order.

    Raises:
        DataError: a file is missing or damaged.
        ConfigError: there are fewer puzzles than asked for.
    """
    assert options.csv
    num_train = asked(options.train, DEFAULT_COUNT)
    if options.csv.is_dir():
        counts = {"train": num_train, "test": options.test}
        found = {}
        for number, (split, count) in enumerate(counts.items()):
            path = options.csv / f"{split}.csv"
            pairs = sample(read(path), count, keyed(options.seed, Use.CHOICE, number))
            found[split] = list(_single(pairs))
            _check(path, split, found[split], count or 1)
        return found
    wanted = {"train": num_train, "test": asked(options.test, DEFAULT_COUNT)}
    pool = _SPARE * sum(wanted.values()) + DEFAULT_COUNT
    pairs = sample(read(options.csv), pool, keyed(options.seed, Use.CHOICE))
    found = {split: [] for split in wanted}
    for split, pair in divide(_single(pairs)):
        if len(found[split]) < wanted[split]:
            found[split].append(pair)
        if all(len(found[name]) == count for name, count in wanted.items()):
            break
    for split, count in wanted.items():
        _check(options.csv, split, found[split], count)
    return found


def _single(pairs: Pairs) -> Iterator[Pairs]:
    for number in range(len(pairs)):
        one = slice(number, number + 1)
        yield Pairs(pairs.questions[one], pairs.answers[one])


def _check(path: Path, split: str, found: list[Pairs], count: int) -> None:
    if len(found) < count:
        raise ConfigError(
            f"--{split} {count}: {path} has no more than {len(found)} puzzles for it; ask for fewer"
        )
