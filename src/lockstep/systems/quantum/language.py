"""Sentences of files and of a small artificial language, and n-gram models of them.

A sentence is an opener, `the`, perhaps an adjective, a noun, perhaps a place ("near the river"), an
adverb, a verb, `the`, an object and a closer, 8 to 12 words of 64:

    always the small robot near the river slowly lifts the stone gladly

A bigram model cannot predict all of it: the verb is one of four that fit the class of the noun, two
to five words before, and the closer is one of two that fit the opener, the first word. Every next
word is drawn uniformly from those that may follow, so the best possible prediction is known.

Jurafsky and Martin, Speech and Language Processing (3rd edition draft), sections 3.1 and 3.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.config.files import read_bytes
from lockstep.errors import DataError

Sentence = tuple[str, ...]

_MAX_BYTES = 256 << 20
"""Most bytes of a corpus: its words take about ten times as much memory."""


def read_sentences(path: Path | str) -> list[Sentence]:
    """The sentences of a UTF-8 text file; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, contains no sentence, or contains one of a single word,
            which has no next word to learn.
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


class Score(NamedTuple):
    """Means over predicted words.

    Attributes:
        accuracy: how often the word is the most probable one; k equally probable ones count 1/k.
        rank: rank of the word by probability, from 1; the mean rank of equally probable ones.
        loss: -ln of the word's probability.
    """

    accuracy: float
    rank: float
    loss: float


def hits_and_ranks(logarithms: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each word is the most probable one, and its rank by probability.

    Args:
        logarithms: logarithms of probabilities, real, [..., words].
        target: number of the word that follows, int64 [...].

    Returns:
        Two tensors [...] of the dtype of `logarithms`: hits from 0 to 1, ranks from 1 on.
    """
    of_target = logarithms.gather(-1, target.unsqueeze(-1))
    greater = (logarithms > of_target).sum(-1)
    equal = (logarithms == of_target).sum(-1)
    hits = (greater == 0) / equal
    return hits.to(logarithms), (greater + (equal + 1) / 2).to(logarithms)


def score(logarithms: Tensor, target: Tensor) -> Score:
    """The score of predictions.

    Args:
        logarithms: logarithms of probabilities, real, [N, words].
        target: number of the word that follows, int64 [N].
    """
    hits, ranks = hits_and_ranks(logarithms, target)
    of_target = logarithms.gather(-1, target.unsqueeze(-1))
    return Score(*(float(values.double().mean()) for values in (hits, ranks, -of_target)))


_CLOSERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "today": ("again", "now"),
        "yesterday": ("before", "twice"),
        "tomorrow": ("soon", "later"),
        "always": ("everywhere", "gladly"),
    }
)
"""The words that may close a sentence, by its opener."""
_NOUNS = (
    ("cat", "dog", "fox", "bird"),
    ("teacher", "farmer", "baker", "child"),
    ("tractor", "engine", "robot", "printer"),
    ("rose", "oak", "tulip", "vine"),
)
_VERBS = (
    ("hunts", "smells", "hears", "chases"),
    ("paints", "buys", "describes", "remembers"),
    ("lifts", "copies", "moves", "crushes"),
    ("shades", "covers", "feeds", "hides"),
)
"""The verbs that fit each class of `_NOUNS`."""
_ADJECTIVES = ("old", "small", "bright", "quiet")
_PREPOSITIONS = ("near", "behind", "beside")
_PLACES = ("garden", "house", "river", "barn")
_ADVERBS = ("slowly", "often", "quietly", "rarely")
_OBJECTS = ("letter", "stone", "basket", "fence")

_EVERY_NOUN = tuple(noun for nouns in _NOUNS for noun in nouns)
_EVERY_VERB = tuple(verb for verbs in _VERBS for verb in verbs)
_FITTING = MappingProxyType(
    {noun: verbs for nouns, verbs in zip(_NOUNS, _VERBS, strict=True) for noun in nouns}
)

MAX_SENTENCES = 100_000
"""Most sentences that may be requested; there are 532,480."""


def followers(words: Sequence[str]) -> tuple[str, ...]:
    """The words that may follow the first words of a sentence, all equally likely.

    Args:
        words: beginning of a sentence of the language; may be empty.

    Returns:
        The words; none after a whole sentence.
    """
    if not words:
        return tuple(_CLOSERS)
    last = words[-1]
    after: dict[tuple[str, ...], tuple[str, ...]] = {
        tuple(_CLOSERS): ("the",),
        _ADJECTIVES: _EVERY_NOUN,
        _EVERY_NOUN: (*_PREPOSITIONS, *_ADVERBS),
        _PREPOSITIONS: ("the",),
        _PLACES: _ADVERBS,
        _EVERY_VERB: ("the",),
        _OBJECTS: _CLOSERS[words[0]],
    }
    for group, found in after.items():
        if last in group:
            return found
    if last == "the":
        if len(words) == 2:
            return (*_ADJECTIVES, *_EVERY_NOUN)
        return _PLACES if words[-2] in _PREPOSITIONS else _OBJECTS
    if last in _ADVERBS:
        return next(_FITTING[word] for word in words if word in _FITTING)
    return ()


def sentences(count: int, seed: int) -> list[Sentence]:
    """Different sentences, drawn word by word.

    Args:
        count: number of sentences, at most `MAX_SENTENCES` and an eighth more.
        seed: seed of the draws, from 0 to 2^64 - 1.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    found: dict[Sentence, None] = {}
    while len(found) < count:
        words: list[str] = []
        while choices := followers(words):
            words.append(choices[generator.integers(len(choices))])
        found[tuple(words)] = None
    return list(found)


def splits(count: int, seed: int) -> tuple[list[Sentence], list[Sentence]]:
    """Sentences to train on, and an eighth as many others (at least one) to test with."""
    drawn = sentences(count + max(1, count // 8), seed)
    return drawn[:count], drawn[count:]


Rows = Sequence[int]
"""A sentence as numbers of its words."""

ADDED = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Values of k that are tried."""
_TUNED_ON = 10
"""One in this many training sentences is held out to choose k."""


class NGram:
    """P(w | the n - 1 words before) = (count(before, w) + k) / (count(before) + k words).

    At a sentence's start, where there are fewer words before, these are the context.

    Attributes:
        order: number n of words of which the last is predicted.
        added: number k.
    """

    def __init__(self, sentences: Sequence[Rows], order: int, num_words: int, added: float) -> None:
        """Count each word except the first of every sentence.

        Args:
            sentences: sentences as numbers of words, from 0 to `num_words` less one.
            order: number n of words of which the last is predicted, at least 1.
            num_words: number of words of the vocabulary.
            added: number k, positive.
        """
        self.order, self.added = order, added
        self._num_words = num_words
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        for sentence in sentences:
            for place in range(1, len(sentence)):
                context = self._context(sentence[:place])
                self._counts.setdefault(context, Counter())[sentence[place]] += 1

    def probabilities(self, before: Rows) -> Tensor:
        """The probability of each word after others, float64 [num_words], of sum 1."""
        counts = torch.full((self._num_words,), self.added, dtype=torch.float64)
        seen = self._counts.get(self._context(before), Counter())
        counts[list(seen)] += torch.tensor(list(seen.values()), dtype=torch.float64)
        return counts / counts.sum()

    def _context(self, before: Rows) -> tuple[int, ...]:
        return tuple(before[max(0, len(before) - self.order + 1) :])


def tuned(sentences: Sequence[Rows], order: int, num_words: int) -> NGram:
    """An n-gram model of all sentences, with the k that predicts a tenth of them best.

    The tenth is predicted by a model of the other sentences; with a single sentence, k is 1.

    Args:
        sentences: sentences as numbers of words, from 0 to `num_words` less one.
        order: number n of words of which the last is predicted, at least 1.
        num_words: number of words of the vocabulary.
    """
    held_out = sentences[::_TUNED_ON] if len(sentences) > 1 else []
    others = [s for number, s in enumerate(sentences) if number % _TUNED_ON]

    def loss(k: float) -> float:
        predicted = predictions(NGram(others, order, num_words, k), held_out)
        return score(predicted.log(), targets(held_out)).loss

    return NGram(sentences, order, num_words, min(ADDED, key=loss) if held_out else 1.0)


def predictions(model: NGram, sentences: Sequence[Rows]) -> Tensor:
    """The probabilities of all words at each position but the first, float64 [positions, words]."""
    return torch.stack(
        [model.probabilities(s[:place]) for s in sentences for place in range(1, len(s))]
    )


def targets(sentences: Sequence[Rows]) -> Tensor:
    """The words at each position but the first, int64 [positions]."""
    return torch.tensor([word for sentence in sentences for word in sentence[1:]])
