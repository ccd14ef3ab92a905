"""Rows of CSV files that come from others, with errors by line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from lockstep.errors import DataError
from lockstep.files import open_to_read
from lockstep.parsing import parse_int, shown

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
