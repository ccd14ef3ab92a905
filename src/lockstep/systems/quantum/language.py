"""Sentences of files and of a small artificial language.

A sentence is an opener, `the`, perhaps an adjective, a noun, perhaps a place ("near the river"), an
adverb, a verb, `the`, an object and a closer, 8 to 12 words of 64:

    always the small robot near the river slowly lifts the stone gladly

A bigram model cannot predict all of it: the verb is one of four that fit the class of the noun, two
to five words before, and the closer is one of two that fit the opener, the first word. Every next
word is drawn uniformly from those that may follow, so the best possible prediction is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import numpy as np

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
        count: number of sentences, at most `MAX_SENTENCES` and a quarter more.
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


def splits(count: int, seed: int) -> dict[str, list[Sentence]]:
    """Sentences to train on, and for `test` and `val` each an eighth as many others, or one."""
    others = max(1, count // 8)
    drawn = sentences(count + 2 * others, seed)
    parts = {"train": count, "test": others, "val": others}
    ends = dict(zip(parts, accumulate(parts.values()), strict=True))
    return {name: drawn[ends[name] - size : ends[name]] for name, size in parts.items()}


def held_out(
    sentences: Sequence[Sentence], fraction: float
) -> tuple[list[Sentence], list[Sentence]]:
    """The sentences that stay, and those that are held out, each in their order.

    Those with the least SHA-256 are held out, so no order of the sentences changes the choice, and
    the same sentence is never on both sides.

    Args:
        sentences: the sentences, some perhaps several times.
        fraction: part of the different sentences to hold out, rounded; of very few none is.
    """
    by_digest = sorted(set(sentences), key=_digest)
    held = set(by_digest[: round(fraction * len(by_digest))])
    return [s for s in sentences if s not in held], [s for s in sentences if s in held]


def _digest(sentence: Sentence) -> bytes:
    return hashlib.sha256(" ".join(sentence).encode()).digest()
