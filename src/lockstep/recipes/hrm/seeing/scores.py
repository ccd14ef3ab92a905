"""How good answers are, after each number of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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


def by_segments(
    trained: Trained, inputs: Tokens, labels: Tokens, numbers: Sequence[int], early: bool
) -> list[Score]:
    """The scores for each number of segments, from one pass over the puzzles.

    Args:
        trained: the model.
        inputs: tokens [N, cells], N at least 1.
        labels: tokens [N, cells].
        numbers: numbers of segments.
        early: whether puzzles halt by themselves.
    """
    sums = np.zeros((len(numbers), 3))
    for which, answers in trained.batches(inputs, max(numbers)):
        for row, most in zip(sums, numbers, strict=True):
            segments = final_segments(answers, most, early)
            parts = accuracy(answers.after(segments), labels[which])
            row += (parts == 1).sum(), parts.sum(), segments.sum()
    means = (sums / len(inputs)).tolist()
    return [Score(most, *row) for most, row in zip(numbers, means, strict=True)]


def final_segments(answers: Answers, most: int, early: bool) -> npt.NDArray[np.int64]:
    """After how many segments each puzzle's answer is taken, int64 [B]."""
    segments = answers.segments(most)
    return segments if early else np.full_like(segments, most)
