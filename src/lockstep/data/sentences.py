"""Corpora: one sentence a line, words separated by white space, upper and lower case distinct."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import DataError
from lockstep.files import read_bytes

Sentence = tuple[str, ...]

_MAX_BYTES = 256 << 20
"""Most bytes of a corpus: its words take about ten times as much memory."""


def read_sentences(path: Path | str) -> list[Sentence]:
    """The sentences of a UTF-8 text file; empty lines are passed over.

    Raises:
        DataError: the file cannot be read, holds no sentence, or one of a single word, which has
            no next word to learn.
    """
    path = Path(path)
    try:
        text = read_bytes(path, _MAX_BYTES, follow_links=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason} at {error.start}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return split_sentences(text.split("\n"), str(path))


def split_sentences(lines: Iterable[str], source: str) -> list[Sentence]:
    """The words of each line that has any.

    Args:
        lines: lines of text.
        source: name of the text in error messages.

    Raises:
        DataError: as `read_sentences`.
    """
    sentences = []
    for number, line in enumerate(lines, start=1):
        words = tuple(line.split())
        if len(words) == 1:
            raise DataError(
                f"{source}: line {number}: {words[0]!r} is one word; a sentence needs at least "
                "two, or there is no next word to learn"
            )
        if words:
            sentences.append(words)
    if not sentences:
        raise DataError(f"{source}: holds no sentence; write one on each line")
    return sentences
