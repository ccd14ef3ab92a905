"""A quantum transformer: two registers that learn to follow sentences."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lockstep.data.sentences import Sentence, read_sentences
from lockstep.engine.task import Loss, Task
from lockstep.errors import ConfigError
from lockstep.optim.lbfgs import LBFGS
from lockstep.optim.natural import NaturalGradient
from lockstep.quantum.transformer.closed_form import loss
from lockstep.quantum.transformer.metric import check_metric_fits, context_root, fubini_study
from lockstep.quantum.transformer.model import QuantumTransformer, Sentences
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
        )

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Sentences as rows of the embeddings; `val` is the training corpus, in one part each.

        Raises:
            DataError: a corpus cannot be read or has a sentence without a next word.
        """
        sentences = self._splits.get("train" if split == "val" else split)
        if sentences is None:
            return None
        words = [torch.tensor([self.vocabulary[w] for w in s]) for s in sentences]
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
        """-ln |A|² of a batch of (parts of) sentences; each restart has its own gradient."""
        assert isinstance(model, QuantumTransformer)
        parts = self.config.parts
        if self.config.deal == "transitions":
            probabilities = model.by_transitions(batch, parts)
        elif self.config.deal == "restarts":
            probabilities = model.by_restarts(batch, parts)
        else:
            probabilities = self._probabilities(model, batch, parts)
        total = loss(probabilities).sum()
        # The value is a mean over restarts and parts, the gradient a sum.
        share = total / (len(probabilities) * parts)
        if len(probabilities) * parts > 1:
            share = share.detach() + (total - total.detach())
        return Loss(share, len(batch.words) / parts, self._metrics(probabilities, parts))

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        """-ln |A|² of whole sentences; with several restarts, also that of each as a metric."""
        assert isinstance(model, QuantumTransformer)
        probabilities = self._probabilities(model, batch, 1)
        losses, count = loss(probabilities), len(batch.words)
        metrics = self._metrics(probabilities, 1)
        if len(losses) > 1:
            rows = losses.sum(1)
            metrics |= {f"restart_{i}": (rows[i], count) for i in range(len(rows))}
        return Loss(losses.mean(0).sum(), count, metrics)

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

    def predict(self, model: QuantumTransformer, prefix: str, restart: int = 0) -> list[Ranked]:
        """The words of the training vocabulary as next word, the most probable first.

        Args:
            model: trained model.
            prefix: words of the prefix, separated by white space; at least one.
            restart: number of the restart whose angles are used.

        Returns:
            Each word with |A|² of the sentence that it ends.

        Raises:
            ConfigError: the prefix is empty, or has a word that is not in the vocabulary.
        """
        given = self.rows(model, prefix)
        if not given:
            raise ConfigError("the prefix has no word; give at least one")
        known = dict.fromkeys(word for sentence in self._splits["train"] for word in sentence)
        candidates = torch.tensor(self.rows(model, " ".join(known)), device=model.angles.device)
        probabilities = model.rank_next(given, candidates, restart).tolist()
        return sorted(zip(known, probabilities, strict=True), key=lambda pair: -pair[1])

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
        """Word to row, in the order of first appearance in training and test sentences."""
        every = [word for split in self._splits.values() for s in split for word in s]
        return {word: row for row, word in enumerate(dict.fromkeys(every))}

    @cached_property
    def _splits(self) -> dict[str, list[Sentence]]:
        corpus, test = self.config.corpus, self.config.test_corpus
        splits = {"train": _sentences(corpus, TRAIN)}
        if test is not None or corpus is None:
            splits["test"] = _sentences(test, TEST)
        return splits

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
            words = self.dataset("val")
            assert isinstance(words, Corpus)
            batch = self.collate([words[i] for i in range(len(words))])
            states = model.encode(batch.words.to(model.angles.device))
            self.__dict__["root"] = context_root(states, batch.transitions)
        return fubini_study(model.angles[0], model.num_qubits, self.__dict__["root"])

    @staticmethod
    def _metrics(
        probabilities: Tensor, parts: int
    ) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        total = probabilities.detach().mean(0).sum()
        return {"probability": (total / parts, probabilities.shape[1] / parts)}


Ranked = tuple[str, float]
"""A word and the probability of the sentence that it ends."""


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
