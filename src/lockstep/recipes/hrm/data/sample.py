"""A random choice of a file's puzzles in one pass, in memory for those that are chosen only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Pairs:
    """Questions and answers, both uint8 [n, length]."""

    questions: Bytes
    answers: Bytes

    def __len__(self) -> int:
        return len(self.questions)


def sample(blocks: Iterable[Pairs], count: int | None, generator: np.random.Generator) -> Pairs:
    """Some of all pairs, in random order: those with the least random numbers.

    Args:
        blocks: all pairs, block by block, at least one.
        count: how many to choose; None for all. There may be fewer.
        generator: draws a number for each pair.
    """
    keys = np.empty(0, np.uint64)
    kept: list[Pairs] = []
    for block in blocks:
        drawn = generator.integers(1 << 63, size=len(block), dtype=np.uint64)
        keys = np.concatenate([keys, drawn])
        kept.append(block)
        if count is not None and len(keys) > 2 * count + (1 << 16):
            keys, kept = _least(keys, kept, count)
    keys, kept = _least(keys, kept, len(keys) if count is None else count)
    return kept[0]


def _least(
    keys: npt.NDArray[np.uint64], kept: list[Pairs], count: int
) -> tuple[npt.NDArray[np.uint64], list[Pairs]]:
    order = np.argsort(keys, kind="stable")[:count]
    questions = np.concatenate([pairs.questions for pairs in kept])[order]
    answers = np.concatenate([pairs.answers for pairs in kept])[order]
    return keys[order], [Pairs(questions, answers)]
