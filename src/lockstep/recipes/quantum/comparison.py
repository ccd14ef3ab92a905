"""Next words of held-out sentences: the model beside chance, counts of words, and the grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.transformer.model import QuantumTransformer
from lockstep.recipes.quantum import grammar
from lockstep.recipes.quantum.ngrams import Rows, predictions, targets
from lockstep.recipes.quantum.scores import Score, score
from lockstep.recipes.quantum.task import Quantum

_AT_A_TIME = 64
"""Sentences whose next words the model predicts at a time."""
_NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


def baselines(task: Quantum) -> dict[str, Score]:
    """Scores on the held-out sentences without a model: chance, n-grams, and the grammar's own.

    The last one is there for sentences of the grammar, and is the best that any model can expect.

    Raises:
        ConfigError: there are no held-out sentences.
    """
    held_out = _held_out(task)
    target, count = targets(held_out), len(task.vocabulary)
    found = {"chance": Score(1 / count, (count + 1) / 2, math.log(count))}
    for order, name in _NAMES.items():
        found[name] = score(predictions(task.ngram(order), held_out).log(), target)
    if task.config.grammar is not None:
        found["the grammar itself"] = score(_true(task).log(), target)
    return found


@torch.no_grad()
def of_model(task: Quantum, model: QuantumTransformer, restart: int = 0) -> Score:
    """The score of a model on the held-out sentences.

    Args:
        task: task of the run.
        model: its model.
        restart: number of the restart whose angles are used.

    Raises:
        ConfigError: there are no held-out sentences.
    """
    held_out = _held_out(task)
    rows = []
    for first in range(0, len(held_out), _AT_A_TIME):
        own = held_out[first : first + _AT_A_TIME]
        batch = task.collate([(torch.tensor(sentence), 0) for sentence in own])
        logarithms = task.next_words(model, batch)[restart].cpu()
        rows += [found[: len(s) - 1] for found, s in zip(logarithms, own, strict=True)]
    return score(torch.cat(rows), targets(held_out))


def table(scores: dict[str, Score]) -> list[str]:
    """Lines of name, accuracy, mean rank and loss."""
    width = max(map(len, scores))
    lines = [f"{'':{width}}  accuracy  mean rank  -ln P a word"]
    return lines + [
        f"{name:{width}}  {s.accuracy:8.4f}  {s.rank:9.3f}  {s.loss:12.4f}"
        for name, s in scores.items()
    ]


def _held_out(task: Quantum) -> Sequence[Rows]:
    if "test" not in task.sentences:
        raise ConfigError("the run has no held-out sentences; train with test_corpus or grammar")
    return task.numbered("test")


def _true(task: Quantum) -> Tensor:
    """The grammar's probabilities of all words at each place but the first."""
    rows = []
    for sentence in task.sentences["test"]:
        for place in range(1, len(sentence)):
            likely = torch.zeros(len(task.vocabulary), dtype=torch.float64)
            chosen = grammar.followers(sentence[:place])
            # A small training set may lack words that the grammar has.
            likely[[task.vocabulary[w] for w in chosen if w in task.vocabulary]] = 1 / len(chosen)
            rows.append(likely)
    return torch.stack(rows)
