"""How good answers are, after each number of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.puzzles import Indices
from lockstep.recipes.hrm.seeing.kinds import Tokens
from lockstep.recipes.hrm.seeing.trained import Answers, Trained

Floats = npt.NDArray[np.float64]


def accuracy(tokens: npt.NDArray[np.integer[Any]], labels: Tokens) -> Floats:
    """The part of each puzzle's labels that is answered, 0 for a puzzle without labels.

    Args:
        tokens: answers [..., B, cells].
        labels: right answers [B, cells]; 0 does not count.

    Returns:
        [..., B].
    """
    valid = labels != 0
    right = ((tokens == labels) & valid).sum(axis=-1)
    return np.asarray(right / np.maximum(valid.sum(axis=-1), 1), np.float64)


@dataclass(frozen=True)
class Score:
    """Means over puzzles.

    Attributes:
        most: number of segments, at most.
        exact: part of the puzzles that are answered without mistake.
        accuracy: part of the cells that are right, in the mean.
        segments: number of segments, in the mean.
    """

    most: int
    exact: float
    accuracy: float
    segments: float


class Takes(Protocol):
    """What keeps answers that are scored."""

    def take(
        self, which: slice, tokens: npt.NDArray[np.uint8], q_halt: npt.NDArray[np.float32]
    ) -> None:
        """Take the answers to a batch.

        Args:
            which: the puzzles; batches come in their order.
            tokens: answers [K, B, cells], for each of K numbers of segments.
            q_halt: logits of halting after them [K, B].
        """


def by_segments(
    trained: Trained,
    inputs: Tokens,
    labels: Tokens,
    numbers: Sequence[int],
    early: bool,
    identifiers: Indices | None = None,
    takers: Sequence[Takes] = (),
) -> list[Score]:
    """The scores for each number of segments, from one pass over the puzzles.

    Args:
        trained: the model.
        inputs: tokens [N, cells], N at least 1.
        labels: tokens [N, cells].
        numbers: numbers of segments.
        early: whether puzzles halt by themselves.
        identifiers: of the puzzles, int64 [N]; None if they are not known, or not to be told.
        takers: are given all answers that are scored.
    """
    sums = np.zeros((len(numbers), 3))
    for which, answers in trained.batches(inputs, max(numbers), identifiers):
        segments = np.stack([final_segments(answers, most, early) for most in numbers])
        tokens = np.stack([answers.after(some) for some in segments])
        parts = accuracy(tokens, labels[which])
        sums += np.stack([(parts == 1).sum(1), parts.sum(1), segments.sum(1)], 1)
        q_halt = answers.q_halt[segments - 1, np.arange(segments.shape[1])]
        for taker in takers:
            taker.take(which, tokens, q_halt)
    means = (sums / len(inputs)).tolist()
    return [Score(most, *row) for most, row in zip(numbers, means, strict=True)]


def final_segments(answers: Answers, most: int, early: bool) -> npt.NDArray[np.int64]:
    """After how many segments each puzzle's answer is taken, int64 [B]."""
    segments = answers.segments(most)
    return segments if early else np.full_like(segments, most)
