"""How well next words are predicted."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Score(NamedTuple):
    """Means over predicted words.

    Attributes:
        accuracy: how often the word is the most probable one; among equals, their share of one.
        rank: place of the word in the order of probability, from 1; among equals, the middle.
        loss: -ln of the word's probability.
    """

    accuracy: float
    rank: float
    loss: float


def places(logarithms: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each word is the most probable one, and its place in the order of probability.

    Args:
        logarithms: logarithms of probabilities, real, [..., words].
        target: number of the word that follows, int64 [...].

    Returns:
        Two tensors [...] of the dtype of `logarithms`: hits from 0 to 1, places from 1 on.
    """
    own = logarithms.gather(-1, target.unsqueeze(-1))
    greater = (logarithms > own).sum(-1)
    equal = (logarithms == own).sum(-1)
    hits = (greater == 0) / equal
    return hits.to(logarithms), (greater + (equal + 1) / 2).to(logarithms)


def score(logarithms: Tensor, target: Tensor) -> Score:
    """The score of predictions.

    Args:
        logarithms: logarithms of probabilities, real, [N, words].
        target: number of the word that follows, int64 [N].
    """
    hits, ranks = places(logarithms, target)
    own = logarithms.gather(-1, target.unsqueeze(-1))
    return Score(*(float(values.double().mean()) for values in (hits, ranks, -own)))
