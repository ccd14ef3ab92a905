"""A small artificial language whose next words depend on words far before them.

A sentence is an opener, `the`, perhaps an adjective, a noun, perhaps a place ("near the river"), an
adverb, a verb, `the`, an object and a closer, 8 to 12 words of 64:

    always the small robot near the river slowly lifts the stone gladly

What a bigram model cannot know: the verb is one of four that fit the class of the noun, which is
two to five words before it, and the closer one of two that fit the opener, the first word. Every
next word is drawn uniformly from those that may follow, so the best possible prediction is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from lockstep.data.sentences import Sentence

_CLOSERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "today": ("again", "now"),
        "yesterday": ("before", "twice"),
        "tomorrow": ("soon", "later"),
        "always": ("everywhere", "gladly"),
    }
)
"""What may close a sentence, by its opener."""
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
"""What nouns of each class of `_NOUNS` do."""
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

MOST = 100_000
"""Most sentences that may be asked for; there are 532,480."""


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
        count: number of sentences, at most `MOST` and an eighth more.
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
