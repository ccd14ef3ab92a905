"""What the quantum transformer learns: sentences of files, of the grammar, or built-in ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.sentences import Sentence, read_sentences
from lockstep.recipes.quantum import grammar
from lockstep.recipes.quantum.config import QuantumConfig

TRAIN = (
    "The cat flies",
    "The quick brown fox jumps",
    "Every morning birds sing songs",
    "Children happily play in parks",
    "Beautiful flowers bloom in spring",
    "Smart students learn new things",
    "Cats sleep quietly on sofas",
    "Dogs bark loudly at strangers",
)
"""Sentences to learn where `corpus` is not set."""
TEST = (
    "The quick brown fox jumps over the lazy dog",
    "I am great",
    "every day is",
    "come and play",
)
"""Sentences to test with where neither `corpus` nor `test_corpus` is set."""


def splits(config: QuantumConfig) -> dict[str, list[Sentence]]:
    """The sentences of `train`, and of `test` if there are any.

    Raises:
        DataError: a corpus cannot be read or has a sentence without a next word.
    """
    if config.grammar is not None:
        train, test = grammar.splits(config.grammar, config.seed)
        return {"train": train, "test": test}
    found = {"train": _sentences(config.corpus, TRAIN)}
    if config.test_corpus is not None or config.corpus is None:
        found["test"] = _sentences(config.test_corpus, TEST)
    return found


class Corpus(Dataset[tuple[Tensor, int]]):
    """Sentences, each once for each part of the work on it; all first parts come first."""

    def __init__(self, sentences: list[Tensor], num_parts: int) -> None:
        self._sentences = sentences
        self._num_parts = num_parts

    def __len__(self) -> int:
        return len(self._sentences) * self._num_parts

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        part, sentence = divmod(int(index), len(self._sentences))
        return self._sentences[sentence], part


def _sentences(path: Path | None, built_in: Iterable[str]) -> list[Sentence]:
    if path is not None:
        return read_sentences(path.expanduser())
    return [tuple(sentence.split()) for sentence in built_in]
