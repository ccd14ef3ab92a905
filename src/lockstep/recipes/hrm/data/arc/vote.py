"""One ranking of answers from those to all augmentations of a task."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.errors import DataError
from lockstep.recipes.hrm.data.arc.augment import Augmentation, parse_name
from lockstep.recipes.hrm.data.arc.tokens import Grid


@dataclass(frozen=True)
class Answer:
    """What a model answered to one test question of a puzzle.

    Attributes:
        name: name of the puzzle's identifier, which says how it was augmented.
        grid: its answer, colours [rows, columns].
        confidence: how sure it is, any finite number; more is surer.
    """

    name: str
    grid: Grid
    confidence: float


@dataclass(frozen=True)
class Candidate:
    """An answer to the task's own question.

    Attributes:
        grid: colours [rows, columns].
        count: number of answers that say it.
        confidence: their mean confidence.
    """

    grid: Grid
    count: int
    confidence: float


def vote(answers: Iterable[Answer]) -> list[Candidate]:
    """The different answers to one question, the most frequent first.

    Of equally frequent ones the one of greater mean confidence comes first, then the one that the
    task itself, not augmented, was answered with, then the one of fewer rows, of fewer columns, and
    of lesser colours. So the ranking depends on the answers alone, and not on their order.

    Args:
        answers: answers to the same test question of a task's augmentations.

    Raises:
        DataError: a name is no augmentation's, or a confidence is not finite.
    """
    grids: dict[tuple[int, int, bytes], Grid] = {}
    confidences: dict[tuple[int, int, bytes], list[float]] = {}
    plain: set[tuple[int, int, bytes]] = set()
    for answer in answers:
        if not math.isfinite(answer.confidence):
            raise DataError(
                f"identifier {answer.name}: confidence={answer.confidence}: must be finite"
            )
        _, augmentation = parse_name(answer.name)
        grid = augmentation.undo(answer.grid)
        key = (grid.shape[0], grid.shape[1], grid.tobytes())
        grids[key] = grid
        confidences.setdefault(key, []).append(answer.confidence)
        if augmentation == Augmentation():
            plain.add(key)
    # fsum rounds once, so that the order of answers does not matter.
    means = {
        key: math.fsum(value / len(values) for value in values)
        for key, values in confidences.items()
    }
    ranked = sorted(
        grids, key=lambda key: (-len(confidences[key]), -means[key], key not in plain, key)
    )
    return [Candidate(grids[key], len(confidences[key]), means[key]) for key in ranked]
