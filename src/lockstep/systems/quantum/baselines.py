"""What simple models predict of next words: n-grams, and small networks of equal size.

Jurafsky and Martin, Speech and Language Processing (3rd edition draft), sections 3.1 and 3.5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.systems.quantum import language as grammar
from lockstep.systems.quantum.language import Sentence


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
        return score(predicted.log(), targets_of(held_out)).loss

    return NGram(sentences, order, num_words, min(ADDED, key=loss) if held_out else 1.0)


class WittenBell:
    """Interpolated n-grams: each context trusts the shorter one by how many words have followed it.

    P(w | h) = (count(h, w) + T(h) P(w | h')) / (count(h) + T(h)), with T(h) different words after h
    and h' without the first word of h; below the unigrams, all words are alike (Witten and Bell
    1991, method C; Chen and Goodman 1999, equation 17).
    """

    def __init__(self, sentences: Sequence[Rows], order: int, num_words: int) -> None:
        """Count each word except the first of every sentence.

        Args:
            sentences: sentences as numbers of words, from 0 to `num_words` less one.
            order: number of words of which the last is predicted, at least 1.
            num_words: number of words of the vocabulary.
        """
        self._order, self._num_words = order, num_words
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        for sentence in sentences:
            for place in range(1, len(sentence)):
                for context in self._contexts(sentence[:place]):
                    self._counts.setdefault(context, Counter())[sentence[place]] += 1

    def probabilities(self, before: Rows) -> Tensor:
        """The probability of each word after others, float64 [num_words], of sum 1."""
        likely = torch.full((self._num_words,), 1 / self._num_words, dtype=torch.float64)
        for context in self._contexts(before):
            seen = self._counts.get(context)
            if seen is None:
                break  # nor has any longer one
            total = seen.total() + len(seen)
            likely *= len(seen) / total
            likely[list(seen)] += torch.tensor(list(seen.values()), dtype=torch.float64) / total
        return likely

    def _contexts(self, before: Rows) -> list[tuple[int, ...]]:
        """The last 0, 1, … words before."""
        return [tuple(before[len(before) - n :]) for n in range(min(self._order, len(before) + 1))]


def predictions(model: NGram | WittenBell, sentences: Sequence[Rows]) -> Tensor:
    """The probabilities of all words at each position but the first, float64 [positions, words]."""
    return torch.stack(
        [model.probabilities(s[:place]) for s in sentences for place in range(1, len(s))]
    )


def targets_of(sentences: Sequence[Rows]) -> Tensor:
    """The words at each position but the first, int64 [positions]."""
    return torch.tensor([word for sentence in sentences for word in sentence[1:]])


class Gru(nn.Module):
    """Words in, a gated recurrent unit, and the words' vectors again for the next word."""

    def __init__(self, num_words: int, width: int, _: int) -> None:
        super().__init__()
        self._words = nn.Embedding(num_words, width)
        self._gru = nn.GRU(width, width, batch_first=True)
        self._bias = nn.Parameter(torch.zeros(num_words))

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next word, [B, L, words], of words [B, L]."""
        states: Tensor = self._gru(self._words(words))[0]
        return states @ self._words.weight.T + self._bias


class Attention(nn.Module):
    """One layer of causal attention with one head, the words' vectors again for the next word."""

    def __init__(self, num_words: int, width: int, length: int) -> None:
        super().__init__()
        self._words = nn.Embedding(num_words, width)
        self._places = nn.Parameter(0.1 * torch.randn(length, width))
        self._mixed = nn.Linear(width, 3 * width, bias=False)
        self._out = nn.Linear(width, width)
        self._bias = nn.Parameter(torch.zeros(num_words))

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next word, [B, L, words], of words [B, L]."""
        states = self._words(words) + self._places[: words.shape[1]]
        query, key, value = self._mixed(states).chunk(3, -1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = (states + self._out(seen)) @ self._words.weight.T + self._bias
        return logits


NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {"GRU": Gru, "attention": Attention}
"""Makes each of words, width, and the length of the longest sentence."""

_MAX_EPOCHS, _PATIENCE, _BATCH, _LR = 100, 5, 128, 0.01
_IGNORED = -100


def largest(kind: Callable[[int, int, int], nn.Module], num: int, words: int, length: int) -> int:
    """The greatest width of a network that has at most `num` parameters; at least 1."""

    def size(width: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in kind(words, width, length).parameters())

    width = 1
    while size(width + 1) <= num:
        width += 1
    return width


def fitted(net: nn.Module, train: Sequence[Rows], val: Sequence[Rows], seed: int) -> None:
    """Train a network by Adam until it predicts `val` no better, and leave it at its best.

    Args:
        net: maps words [B, L] to logits [B, L, words].
        train: sentences to learn.
        val: sentences that choose the epoch.
        seed: seed of the order of sentences.
    """
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), _LR)
    best, since = math.inf, 0
    kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for _ in range(_MAX_EPOCHS):
        rows = torch.randperm(len(train), generator=order).tolist()
        for first in range(0, len(rows), _BATCH):
            words, targets = _padded([train[row] for row in rows[first : first + _BATCH]])
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(net(words).flatten(0, 1), targets.flatten()))
            optimizer.step()
        loss = score(of_network(net, val), targets_of(val)).loss
        if loss < best:
            best, since = loss, 0
            kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        since += 1
        if since > _PATIENCE:
            break
    net.load_state_dict(kept)


@torch.no_grad()
def of_network(net: nn.Module, sentences: Sequence[Rows]) -> Tensor:
    """The logarithms of its predictions at each position but the first, [positions, words]."""
    words, _ = _padded(sentences)
    logits = net(words).log_softmax(-1)
    return torch.cat([row[: len(s) - 1] for row, s in zip(logits, sentences, strict=True)])


def _padded(sentences: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """All words but the last of each sentence, and all but the first."""
    rows = [torch.tensor(sentence) for sentence in sentences]
    words = pad_sequence([row[:-1] for row in rows], batch_first=True)
    following = pad_sequence([r[1:] for r in rows], batch_first=True, padding_value=_IGNORED)
    return words, following


def reached(
    train: Sequence[Rows],
    val: Sequence[Rows],
    held_out: Sequence[Rows],
    num_words: int,
    num_parameters: int,
    seed: int,
) -> dict[str, Score]:
    """What simple models that learn some sentences reach on others.

    Args:
        train: sentences to learn, as numbers of words.
        val: sentences that choose when networks have learned enough.
        held_out: sentences that are predicted.
        num_words: number of words of the vocabulary.
        num_parameters: most parameters of a network, unless its least width has more.
        seed: seed of the networks.

    Returns:
        Scores of chance, unigrams, bigrams, trigrams, and networks of `NETWORKS`, by name.
    """
    target = targets_of(held_out)
    found = {"chance": Score(1 / num_words, (num_words + 1) / 2, math.log(num_words))}
    models: dict[str, NGram | WittenBell] = {
        "unigrams": tuned(train, 1, num_words),
        "bigrams": tuned(train, 2, num_words),
        "trigrams (Witten-Bell)": WittenBell(train, 3, num_words),
    }
    for name, model in models.items():
        found[name] = score(predictions(model, held_out).log(), target)
    length = max(len(s) for split in (train, val, held_out) for s in split)
    for name, kind in NETWORKS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = kind(num_words, largest(kind, num_parameters, num_words, length), length)
        fitted(net, train, val, seed)
        size = sum(p.numel() for p in net.parameters())
        found[f"{name}, {size:,} parameters"] = score(of_network(net, held_out), target)
    return found


def of_grammar(sentences: Sequence[Sentence], vocabulary: Mapping[str, int]) -> Score:
    """The best score that any model can expect on sentences of the grammar."""
    rows = []
    for sentence in sentences:
        for place in range(1, len(sentence)):
            likely = torch.zeros(len(vocabulary), dtype=torch.float64)
            chosen = grammar.followers(sentence[:place])
            # A small corpus may lack some words of the grammar.
            likely[[vocabulary[w] for w in chosen if w in vocabulary]] = 1 / len(chosen)
            rows.append(likely)
    target = targets_of([[vocabulary[word] for word in sentence] for sentence in sentences])
    return score(torch.stack(rows).log(), target)
