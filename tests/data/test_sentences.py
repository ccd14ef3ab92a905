from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.systems.quantum.language import read_sentences


def corpus(folder: Path, text: str | bytes) -> Path:
    path = folder / "corpus.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_sentence_is_a_line_and_case_counts(tmp_path: Path) -> None:
    path = corpus(tmp_path, "The cat flies\r\n\n  the  dog\tbarks \n")
    assert read_sentences(path) == [("The", "cat", "flies"), ("the", "dog", "barks")]


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path: Path) -> None:
    assert read_sentences(corpus(tmp_path, "\ufeffThe cat"))[0] == ("The", "cat")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no sentence"),
        ("\n  \n", "holds no sentence"),
        ("The cat\n\nGo\n", r"line 3: 'Go' is one word"),
        (b"The \xff cat", "is not UTF-8 text"),
    ],
)
def test_bad_corpora_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = corpus(tmp_path, text)
    with pytest.raises(DataError, match=rf"^{path}: .*{message}"):
        read_sentences(path)


def test_a_missing_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt: cannot be read: No such file"):
        read_sentences(tmp_path / "none.txt")


@pytest.mark.timeout(10)
def test_a_corpus_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(DataError, match="not a regular file"):
            read_sentences(path)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="is larger than"):
        read_sentences(tmp_path / "sparse")
