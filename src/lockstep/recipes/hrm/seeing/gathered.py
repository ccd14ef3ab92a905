"""All that a page says of a split, gathered batch by batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.puzzles import Indices
from lockstep.recipes.hrm.seeing.kinds import Tokens
from lockstep.recipes.hrm.seeing.scores import accuracy, final_segments
from lockstep.recipes.hrm.seeing.trained import Answers, Trained


@dataclass(frozen=True)
class Seen:
    """A puzzle and all its answers.

    Attributes:
        number: number of the puzzle in its split, from 1.
        question: tokens [cells].
        label: tokens [cells]; 0 does not count.
        answers: uint8 [S, cells], after each segment.
        q_halt: float32 [S], logits of halting.
        halted: after how many segments the puzzle halts by itself; None if it does not.
        used: after how many segments the answer that is scored is taken.
        is_right: whether the answer that is scored has no mistake.
    """

    number: int
    question: Tokens
    label: Tokens
    answers: npt.NDArray[np.uint8]
    q_halt: npt.NDArray[np.float32]
    halted: int | None
    used: int
    is_right: bool


@dataclass
class Gathered:
    """Scores and predictions of a split, and some of its puzzles.

    Attributes:
        exact: float64 [S], part of the puzzles that are right after each segment.
        accuracy: float64 [S], part of the cells, in the mean.
        halting: int64 [S + 1], how many puzzles halt by themselves after each segment; the last
            number is that of puzzles that do not.
        inputs: uint8 [N, cells].
        labels: uint8 [N, cells].
        predictions: uint8 [N, cells], the answers that are scored.
        segments: int64 [N], after how many segments each puzzle halts by itself, S at most.
        used: int64 [N], the segment that each prediction is of.
        q_halt: float32 [N], logits of halting after that segment.
        wrong: the first puzzles with mistakes.
        right: the first puzzles without.
    """

    exact: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]
    halting: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]
    predictions: npt.NDArray[np.uint8]
    segments: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    q_halt: npt.NDArray[np.float32]
    wrong: list[Seen] = field(default_factory=list)
    right: list[Seen] = field(default_factory=list)

    def shown(self, num: int) -> list[Seen]:
        """So many puzzles, those with mistakes first."""
        return [*self.wrong, *self.right][:num]

    @property
    def parts(self) -> npt.NDArray[np.float64]:
        """The part of each prediction's cells that is right, [N]."""
        return accuracy(self.predictions, self.labels)


def gather(
    trained: Trained,
    inputs: Tokens,
    labels: Tokens,
    most: int,
    early: bool,
    num: int,
    identifiers: Indices | None = None,
) -> Gathered:
    """Solve all puzzles of a split.

    Args:
        trained: the model.
        inputs: tokens [N, cells], N at least 1.
        labels: tokens [N, cells].
        most: number of segments.
        early: whether the answer is scored with which a puzzle halts by itself.
        num: how many puzzles to keep at most, of those with mistakes and of those without.
        identifiers: of the puzzles, int64 [N]; None if they are not known, or not to be told.
    """
    count = len(inputs)
    found = Gathered(
        np.zeros(most), np.zeros(most), np.zeros(most + 1, np.int64),
        inputs.astype(np.uint8), labels.astype(np.uint8), np.zeros(inputs.shape, np.uint8),
        np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.float32),
    )  # fmt: skip
    for which, answers in trained.batches(inputs, most, identifiers):
        _add(found, which, answers, early, num)
    found.exact /= count
    found.accuracy /= count
    return found


def _add(found: Gathered, which: slice, answers: Answers, early: bool, num: int) -> None:
    """Take the answers to a batch; exact and accuracy stay sums until the end."""
    most = len(answers.tokens)
    parts = accuracy(answers.tokens, found.labels[which])
    found.exact += (parts == 1).sum(axis=1)
    found.accuracy += parts.sum(axis=1)
    segments, used = answers.segments(most), final_segments(answers, most, early)
    halts = np.asarray(answers.wants.any(axis=0))
    found.halting += np.bincount(np.where(halts, segments - 1, most), minlength=most + 1)
    everyone = np.arange(len(used))
    found.predictions[which] = answers.after(used)
    found.segments[which], found.used[which] = segments, used
    found.q_halt[which] = answers.q_halt[used - 1, everyone]
    is_right = np.asarray(parts[used - 1, everyone] == 1)
    for place in everyone.tolist():
        kept = found.right if is_right[place] else found.wrong
        if len(kept) < num:
            at = which.start + place
            kept.append(
                Seen(
                    at + 1, found.inputs[at], found.labels[at], answers.tokens[:, place].copy(),
                    answers.q_halt[:, place].copy(),
                    int(segments[place]) if halts[place] else None, int(used[place]),
                    bool(is_right[place]),
                )
            )  # fmt: skip
