"""What counting words can predict: n-gram models with add-k smoothing.

Jurafsky and Martin, Speech and Language Processing (3rd edition draft), sections 3.1 and 3.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.recipes.quantum.scores import score

Rows = Sequence[int]
"""A sentence as numbers of its words."""

ADDED = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Values of k that are tried."""
_TUNED_ON = 10
"""One of so many training sentences is kept back to choose k."""


class NGram:
    """P(w | the n - 1 words before) = (count(before, w) + k) / (count(before) + k words).

    At a sentence's start, where there are fewer words before, these are the context.

    Attributes:
        order: number n of words of which the last is predicted.
        added: number k.
    """

    def __init__(self, sentences: Sequence[Rows], order: int, num_words: int, added: float) -> None:
        """Count each word but the first of every sentence.

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

    The tenth is predicted by a model of the others; of a single sentence, k is 1.

    Args:
        sentences: sentences as numbers of words, from 0 to `num_words` less one.
        order: number n of words of which the last is predicted, at least 1.
        num_words: number of words of the vocabulary.
    """
    kept = sentences[::_TUNED_ON] if len(sentences) > 1 else []
    others = [s for number, s in enumerate(sentences) if number % _TUNED_ON]
    added = 1.0
    if kept:
        losses = {k: _loss(NGram(others, order, num_words, k), kept) for k in ADDED}
        added = min(losses, key=losses.__getitem__)
    return NGram(sentences, order, num_words, added)


def predictions(model: NGram, sentences: Sequence[Rows]) -> Tensor:
    """The probabilities of all words at each place but the first, float64 [places, words]."""
    return torch.stack(
        [model.probabilities(s[:place]) for s in sentences for place in range(1, len(s))]
    )


def targets(sentences: Sequence[Rows]) -> Tensor:
    """The words at each place but the first, int64 [places]."""
    return torch.tensor([word for sentence in sentences for word in sentence[1:]])


def _loss(model: NGram, sentences: Sequence[Rows]) -> float:
    return score(predictions(model, sentences).log(), targets(sentences)).loss
