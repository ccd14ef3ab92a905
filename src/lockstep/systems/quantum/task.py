"""A quantum transformer: two registers that learn to follow sentences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lockstep.engine.task import Loss, Task
from lockstep.errors import ConfigError
from lockstep.observe.baselines import LIMIT, MODEL
from lockstep.optim.gradient_based import LBFGS, NaturalGradient
from lockstep.systems.quantum.baselines import (
    NGram,
    Score,
    hits_and_ranks,
    of_grammar,
    reached,
    score,
    targets_of,
    tuned,
)
from lockstep.systems.quantum.config import Corpus, QuantumConfig, corpora, splits
from lockstep.systems.quantum.language import Sentence, held_out
from lockstep.systems.quantum.transformer.amplitudes import (
    check_metric_fits,
    context_root,
    fubini_study,
    log_likelihoods,
    loss,
    of_sentences,
)
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

_AT_A_TIME = 64
"""Sentences whose next words the model predicts at a time."""
_CHOSEN_BY = 0.1
"""Part of the training sentences that tells networks when they have learned enough."""

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]
"""Sums and weights by name."""


class Ranked(NamedTuple):
    """A word as the next one.

    Attributes:
        word: the word.
        probability: that of the model.
        bigram: that of a bigram model of the training sentences.
    """

    word: str
    probability: float
    bigram: float


class Quantum(Task):
    """A quantum transformer that learns sentences word by word."""

    Config = QuantumConfig
    config: QuantumConfig

    def build_model(self) -> QuantumTransformer:
        """The transformer, whose vocabulary is that of all splits.

        Raises:
            DataError: a corpus cannot be read or has a sentence without a next word.
        """
        config = self.config
        return QuantumTransformer(
            list(self.vocabulary),
            config.embedding_dim,
            config.num_layers,
            restarts=config.restarts,
            seed=config.seed,
            dtype=torch.float64 if config.dtype == "complex128" else torch.float32,
            trainable=config.embedding == "trainable",
            word_scale=config.word_scale,
            position_scale=config.position_scale,
        )

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Sentences as rows of the embeddings; those of splits to evaluate in one part each.

        Raises:
            DataError: a corpus cannot be read or has a sentence without a next word.
        """
        if split not in self.sentences:
            return None
        words = [torch.tensor(sentence) for sentence in self.numbered(split)]
        if split != "train":
            return Corpus(words, 1)
        order = list(range(len(words)))
        if self.config.shards == "strided":
            count = self.config.num_microbatches
            order = [i for first in range(count) for i in order[first::count]]
        return Corpus([words[i] for i in order], self.config.parts)

    def collate(self, samples: list[Any]) -> Sentences:
        """A batch of sentences, padded to the longest."""
        words = [sentence for sentence, _ in samples]
        return Sentences(
            pad_sequence(words, batch_first=True),
            torch.tensor([len(sentence) - 1 for sentence in words]),
            torch.tensor([part for _, part in samples]),
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The objective for (parts of) sentences; each restart has its own gradient."""
        assert isinstance(model, QuantumTransformer)
        if self.config.objective == "likelihood":
            return self._likelihood(model, batch)
        parts = self.config.parts
        if self.config.deal == "transitions":
            probabilities = model.by_transitions(batch, parts)
        elif self.config.deal == "restarts":
            probabilities = model.by_restarts(batch, parts)
        else:
            probabilities = self._probabilities(model, batch, parts)
        total = loss(probabilities).sum()
        share = _mean_value_summed_gradient(total, len(probabilities) * parts)
        return Loss(share, len(batch.words) / parts, self._metrics(probabilities, parts))

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        """The objective of whole sentences; of several restarts, also each one's as a metric."""
        assert isinstance(model, QuantumTransformer)
        if self.config.objective == "likelihood":
            return self._likelihood(model, batch)
        probabilities = self._probabilities(model, batch, 1)
        losses, count = loss(probabilities), len(batch.words)
        metrics = self._metrics(probabilities, 1) | _by_restart(losses.sum(1), count)
        return Loss(losses.mean(0).sum(), count, metrics)

    def _likelihood(self, model: QuantumTransformer, batch: Sentences) -> Loss:
        """-ln of the probability of each word but the first, with how well these are ranked."""
        logarithms = self.next_words(model, batch)
        target = batch.words[:, 1:].expand(logarithms.shape[:-1])
        numbers = torch.arange(1, batch.words.shape[1], device=target.device)
        is_valid = numbers <= batch.transitions[:, None]
        of_target = logarithms.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        losses = -(of_target * is_valid).flatten(1).sum(1)
        count = batch.transitions.sum()
        hits, ranks = hits_and_ranks(logarithms.detach(), target)
        found: Metrics = {
            name: ((values * is_valid).mean(0).sum(), count)
            for name, values in (("accuracy", hits), ("mean_rank", ranks))
        }
        share = _mean_value_summed_gradient(losses.sum(), len(losses))
        return Loss(share, count, found | _by_restart(losses.detach(), count))

    def next_words(self, model: QuantumTransformer, batch: Sentences) -> Tensor:
        """The logarithm of the probability of each word of the vocabulary at each position.

        Where the objective is fidelity, it is |A|² of the sentence that ends with the word, else
        |a|² of its last transition; both normalised over the vocabulary.

        Args:
            model: the transformer.
            batch: B sentences of at most L words, on any device.

        Returns:
            Real [restarts, B, L - 1, words]; undefined beyond a sentence's end.
        """
        batch = Sentences(*(values.to(model.angles.device) for values in batch))
        amplitudes = model.next_words(batch)
        if self.config.objective == "fidelity":
            amplitudes = of_sentences(amplitudes, batch.words)
        return log_likelihoods(amplitudes)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """L-BFGS or natural gradient descent, where `optimizer.name` says so.

        Raises:
            ConfigError: the metric of natural gradient descent does not fit into memory.
        """
        assert isinstance(model, QuantumTransformer)
        config, optimizer = self.config, self.config.optimizer
        if optimizer.name == "lbfgs":
            return LBFGS(model.parameters(), config.lr, optimizer.history, optimizer.max_step)
        if optimizer.name == "natural":
            check_metric_fits(config.embedding_dim, model.embeddings.dtype, model.angles.device)
            metric = partial(self._metric, model)
            return NaturalGradient(model.angles, metric, config.lr, optimizer.damping)
        return None

    @torch.no_grad()
    def predict(self, model: QuantumTransformer, prefix: str, restart: int = 0) -> list[Ranked]:
        """The words of the training vocabulary as next word, the most probable first.

        Args:
            model: trained model.
            prefix: words of the prefix, separated by white space; at least one.
            restart: number of the restart whose angles are used.

        Returns:
            Each word with its probability among these words by the model (`next_words`) and by a
            bigram model.

        Raises:
            ConfigError: the prefix is empty, or has a word that is not in the vocabulary.
        """
        words = self.rows(model, prefix)
        if not words:
            raise ConfigError("the prefix has no word; give at least one")
        known = dict.fromkeys(word for sentence in self.sentences["train"] for word in sentence)
        rows = self.rows(model, " ".join(known))
        # The last word is arbitrary: it is the one that is predicted.
        batch = self.collate([(torch.tensor([*words, 0]), 0)])
        likely = self.next_words(model, batch)[restart, 0, -1, rows].softmax(-1)
        counted = self.ngram(2).probabilities(words)[rows]
        columns = zip(known, likely.tolist(), (counted / counted.sum()).tolist(), strict=True)
        return sorted(map(Ranked._make, columns), key=lambda ranked: -ranked.probability)

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """How well next words of a split are predicted, without the model and with it.

        Networks have at most as many parameters as the model has angles and numbers of words. For
        sentences of the grammar, `the grammar itself` is the best that any model can expect.
        """
        assert isinstance(model, QuantumTransformer)
        kept, val = self.sentences["train"], self.sentences.get("val", [])
        if not val or split == "val" or self.config.validate_on == "train":
            kept, val = held_out(kept, _CHOSEN_BY)
        learned, chosen = self._rows(kept), self._rows(val or kept)
        size = model.angles[0].numel() + model.embeddings.numel()
        words, seed = len(self.vocabulary), self.config.seed
        found = reached(learned, chosen, self.numbered(split), words, size, seed)
        if self.config.grammar is not None:
            best = of_grammar(self.sentences[split], self.vocabulary)
            found[f"the grammar itself{LIMIT}"] = best
        found[MODEL] = self.score(model, split)
        return {name: one._asdict() for name, one in found.items()}

    @torch.no_grad()
    def score(self, model: QuantumTransformer, split: str) -> Score:
        """How well the best restart of a model predicts the next words of a split."""
        sentences, restart = self.numbered(split), self.best_restart(model)
        rows = []
        for first in range(0, len(sentences), _AT_A_TIME):
            chosen = sentences[first : first + _AT_A_TIME]
            batch = self.collate([(torch.tensor(sentence), 0) for sentence in chosen])
            logarithms = self.next_words(model, batch)[restart].cpu()
            rows += [row[: len(s) - 1] for row, s in zip(logarithms, chosen, strict=True)]
        return score(torch.cat(rows), targets_of(sentences))

    @torch.no_grad()
    def best_restart(self, model: QuantumTransformer) -> int:
        """The restart with the least loss on `val`, or on `train` where nothing is held out."""
        if model.angles.shape[0] == 1:
            return 0
        sentences = self.numbered("val" if "val" in self.sentences else "train")
        batch = self.collate([(torch.tensor(sentence), 0) for sentence in sentences])
        found = self.evaluate(model, batch).metrics
        losses = [found[f"restart_{i}"][0] for i in range(model.angles.shape[0])]
        return min(range(len(losses)), key=lambda i: float(losses[i]))

    def data_remarks(self) -> list[str]:
        """How many sentences of other splits are learned, too."""
        learned = set(self.sentences["train"])
        counts = {
            name: len(learned.intersection(split))
            for name, split in self.sentences.items()
            if name != "train" and not (name == "val" and self.config.validate_on == "train")
        }
        return [
            f"{count} sentences of {name} are training sentences, too"
            for name, count in counts.items()
            if count
        ]

    def ngram(self, order: int) -> NGram:
        """An n-gram model of the training sentences over the whole vocabulary."""
        return tuned(self.numbered("train"), order, len(self.vocabulary))

    def numbered(self, split: str) -> list[list[int]]:
        """The sentences of a split as rows of the embeddings."""
        return self._rows(self.sentences[split])

    def _rows(self, sentences: list[Sentence]) -> list[list[int]]:
        return [[self.vocabulary[word] for word in sentence] for sentence in sentences]

    @staticmethod
    def rows(model: QuantumTransformer, text: str) -> list[int]:
        """Rows of the embeddings for the words of a text.

        Raises:
            ConfigError: a word is not in the vocabulary.
        """
        rows = {word: row for row, word in enumerate(model.words)}
        unknown = [word for word in text.split() if word not in rows]
        if unknown:
            raise ConfigError(
                f"{text!r}: the model has no vector for {', '.join(map(repr, unknown))}"
            )
        return [rows[word] for word in text.split()]

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Word to row, in the order of first appearance in `corpora`, whatever is held out."""
        every = [word for split in self._corpora.values() for s in split for word in s]
        return {word: row for row, word in enumerate(dict.fromkeys(every))}

    @cached_property
    def sentences(self) -> Mapping[str, list[Sentence]]:
        """The sentences of `train`, and of `val` and `test` if there are any."""
        return splits(self.config, self._corpora)

    @cached_property
    def _corpora(self) -> dict[str, list[Sentence]]:
        return corpora(self.config)

    def _probabilities(self, model: QuantumTransformer, batch: Sentences, parts: int) -> Tensor:
        """|A|² of whole sentences, [restarts, B], by the backend."""
        config = self.config
        if config.backend == "closed_form":
            probabilities: Tensor = model(batch)
            return probabilities
        shift = config.grad == "shift"
        return model.by_circuits(batch, shift=shift, shots=config.shots, num_parts=parts)

    def _metric(self, model: QuantumTransformer) -> Tensor:
        if "root" not in self.__dict__:
            batch = self.collate([(torch.tensor(s), 0) for s in self.numbered("train")])
            states = model.encode(batch.words.to(model.angles.device))
            self.__dict__["root"] = context_root(states, batch.transitions)
        return fubini_study(model.angles[0], model.num_qubits, self.__dict__["root"])

    @staticmethod
    def _metrics(probabilities: Tensor, parts: int) -> Metrics:
        total = probabilities.detach().mean(0).sum()
        return {"probability": (total / parts, probabilities.shape[1] / parts)}


def _mean_value_summed_gradient(total: Tensor, count: int) -> Tensor:
    """The value of total / count with the gradient of total: that of each restart and part."""
    share = total / count
    return share if count == 1 else share.detach() + (total - total.detach())


def _by_restart(losses: Tensor, count: Tensor | float) -> Metrics:
    """The loss of each restart as a metric, where there are several; `losses` is [restarts]."""
    if len(losses) == 1:
        return {}
    return {f"restart_{i}": (loss, count) for i, loss in enumerate(losses)}
