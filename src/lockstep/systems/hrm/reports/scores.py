"""A model's answers to all puzzles of a split: scores by segments, votes, and single puzzles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.systems.hrm.data.arc import Answer, Grid, parse_name, to_grid, vote
from lockstep.systems.hrm.puzzles import Indices, Puzzles
from lockstep.systems.hrm.reports.rules import Tokens
from lockstep.systems.hrm.reports.terminal import probability
from lockstep.systems.hrm.reports.trained_model import Answers, TrainedModel

Floats = npt.NDArray[np.float64]

Consumer = Callable[[slice, npt.NDArray[np.uint8], npt.NDArray[np.float32]], None]
"""Takes the answers to a batch: its slice of the puzzles, in order; the tokens [K, B, cells] for
each of K numbers of segments; and the logits of halting after them [K, B]."""


def accuracy(tokens: npt.NDArray[np.integer[Any]], labels: Tokens) -> Floats:
    """The fraction of each puzzle's labels that is answered right, 0 for a puzzle without labels.

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
        most: largest number of segments.
        exact: fraction of puzzles that are answered without mistake.
        accuracy: mean fraction of right cells.
        segments: mean number of segments.
    """

    most: int
    exact: float
    accuracy: float
    segments: float


def by_segments(
    run: TrainedModel,
    inputs: Tokens,
    labels: Tokens,
    numbers: Sequence[int],
    early: bool,
    identifiers: Indices | None = None,
    consumers: Sequence[Consumer] = (),
) -> list[Score]:
    """The scores for each number of segments, from one pass over the puzzles.

    Args:
        run: the model.
        inputs: tokens [N, cells], N at least 1.
        labels: tokens [N, cells].
        numbers: numbers of segments.
        early: whether puzzles halt by themselves.
        identifiers: of the puzzles, int64 [N]; None for blank ones.
        consumers: called with all answers that are scored.
    """
    sums = np.zeros((len(numbers), 3))
    for which, answers in run.batches(inputs, max(numbers), identifiers):
        segments = np.stack([final_segments(answers, most, early) for most in numbers])
        tokens = np.stack([answers.after(some) for some in segments])
        parts = accuracy(tokens, labels[which])
        sums += np.stack([(parts == 1).sum(1), parts.sum(1), segments.sum(1)], 1)
        q_halt = answers.q_halt[segments - 1, np.arange(segments.shape[1])]
        for consume in consumers:
            consume(which, tokens, q_halt)
    means = (sums / len(inputs)).tolist()
    return [Score(most, *row) for most, row in zip(numbers, means, strict=True)]


def final_segments(answers: Answers, most: int, early: bool) -> npt.NDArray[np.int64]:
    """The number of segments before each puzzle's answer that is scored, int64 [B]."""
    segments = answers.segments(most)
    return segments if early else np.full_like(segments, most)


@dataclass(frozen=True)
class PuzzleAnswers:
    """A puzzle and all its answers.

    Attributes:
        number: number of the puzzle in its split, from 1.
        question: tokens [cells].
        label: tokens [cells]; 0 does not count.
        answers: uint8 [S, cells], after each segment.
        q_halt: float32 [S], logits of halting.
        halted: number of segments after which the puzzle halts; None if it does not.
        used: number of segments before the answer that is scored.
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
class SplitAnswers:
    """Scores and predictions of a split, and some of its puzzles.

    Attributes:
        exact: float64 [S], fraction of puzzles that are right after each segment.
        accuracy: float64 [S], mean fraction of right cells.
        halting: int64 [S + 1], number of puzzles that halt after each segment; the last one is the
            number of puzzles that do not halt.
        inputs: uint8 [N, cells].
        labels: uint8 [N, cells].
        predictions: uint8 [N, cells], the answers that are scored.
        segments: int64 [N], number of segments after which each puzzle halts, at most S.
        used: int64 [N], number of segments before each prediction.
        q_halt: float32 [N], logits of halting after that segment.
        wrong: the first puzzles with mistakes.
        right: the first puzzles without mistakes.
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
    wrong: list[PuzzleAnswers] = field(default_factory=list)
    right: list[PuzzleAnswers] = field(default_factory=list)

    def examples(self, num: int) -> list[PuzzleAnswers]:
        """At most `num` puzzles, those with mistakes first."""
        return [*self.wrong, *self.right][:num]


def answer_split(
    run: TrainedModel,
    inputs: Tokens,
    labels: Tokens,
    most: int,
    early: bool,
    num: int,
    identifiers: Indices | None = None,
) -> SplitAnswers:
    """A model's answers to all puzzles of a split.

    Args:
        run: the model.
        inputs: tokens [N, cells], N at least 1.
        labels: tokens [N, cells].
        most: number of segments.
        early: whether to score the answer with which a puzzle halts, rather than the last one.
        num: most puzzles to keep, of those with mistakes and of those without.
        identifiers: of the puzzles, int64 [N]; None for blank ones.
    """
    count = len(inputs)
    found = SplitAnswers(
        np.zeros(most), np.zeros(most), np.zeros(most + 1, np.int64),
        inputs.astype(np.uint8), labels.astype(np.uint8), np.zeros(inputs.shape, np.uint8),
        np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.float32),
    )  # fmt: skip
    for which, answers in run.batches(inputs, most, identifiers):
        _add(found, which, answers, early, num)
    found.exact /= count
    found.accuracy /= count
    return found


def _add(found: SplitAnswers, which: slice, answers: Answers, early: bool, num: int) -> None:
    """Add the answers to a batch; `exact` and `accuracy` are sums until the end."""
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
    for index in everyone.tolist():
        kept = found.right if is_right[index] else found.wrong
        if len(kept) < num:
            row = which.start + index
            kept.append(
                PuzzleAnswers(
                    row + 1, found.inputs[row], found.labels[row], answers.tokens[:, index].copy(),
                    answers.q_halt[:, index].copy(),
                    int(segments[index]) if halts[index] else None, int(used[index]),
                    bool(is_right[index]),
                )
            )  # fmt: skip


@dataclass
class Ballot:
    """The votes on one question.

    Attributes:
        truth: the right answer, colours [rows, columns].
        answers: the model's answers, for each number of segments.
    """

    truth: Grid
    answers: list[list[Answer]] = field(default_factory=list)

    def is_right(self, number: int, attempts: int) -> bool:
        """Whether the right answer is among the first `attempts` of the vote's ranking."""
        ranked = vote(self.answers[number])[:attempts]
        return any(np.array_equal(candidate.grid, self.truth) for candidate in ranked)


class Votes:
    """Counts the votes over a dataset's test, task by task.

    A group of the dataset is a task with its augmentations. Its votes are counted as soon as it is
    complete, so that memory is that of one task.

    Attributes:
        num_tasks: number of tasks whose votes are counted.
        num_questions: number of their questions.
    """

    def __init__(
        self, puzzles: Puzzles, names: Sequence[str], num_numbers: int, attempts: Sequence[int]
    ) -> None:
        """Begin with no votes.

        Args:
            puzzles: the test.
            names: names of its identifiers.
            num_numbers: numbers of segments, each with a vote of its own.
            attempts: numbers of attempts to score.
        """
        self._puzzles, self._names = puzzles, names
        self._num_numbers, self._attempts = num_numbers, attempts
        self._ends = iter(puzzles.puzzles[puzzles.groups[1:]].tolist())
        self._end = next(self._ends)
        self._questions = _questions(puzzles, names)
        self._open: dict[tuple[str, int], Ballot] = {}
        self._sums = np.zeros((num_numbers, len(attempts)))
        self.num_tasks = self.num_questions = 0

    def add(
        self, which: slice, tokens: npt.NDArray[np.uint8], q_halt: npt.NDArray[np.float32]
    ) -> None:
        """Add the answers to a batch, see `Consumer`.

        Raises:
            DataError: the name of an identifier is not that of an augmentation.
        """
        labels = self._puzzles.labels[which].numpy()
        for index, example in enumerate(range(which.start, which.stop)):
            name, number = next(self._questions)
            task, augmentation = parse_name(name)
            ballot = self._open.get((task, number))
            if ballot is None:
                truth = augmentation.undo(to_grid(labels[index]))
                ballot = Ballot(truth, [[] for _ in range(self._num_numbers)])
                self._open[task, number] = ballot
            for answers, answer, logit in zip(
                ballot.answers, tokens[:, index], q_halt[:, index], strict=True
            ):
                answers.append(Answer(name, to_grid(answer), probability(float(logit))))
            if example + 1 == self._end:
                self._count()
                self._end = next(self._ends, -1)

    def _count(self) -> None:
        """Count the votes of a task; each of its questions has the same weight."""
        tasks: dict[str, list[Ballot]] = {}
        for (task, _), ballot in self._open.items():
            tasks.setdefault(task, []).append(ballot)
        for ballots in tasks.values():
            right = [
                [[b.is_right(n, a) for a in self._attempts] for n in range(self._num_numbers)]
                for b in ballots
            ]
            self._sums += np.mean(np.array(right, np.float64), axis=0)
        self.num_tasks += len(tasks)
        self.num_questions += len(self._open)
        self._open = {}

    @property
    def passes(self) -> npt.NDArray[np.float64]:
        """Fraction of tasks that are solved within each number of attempts: [K, attempts].

        A task with several questions counts by the fraction of them that are solved.
        """
        return self._sums / max(self.num_tasks, 1)


def _questions(puzzles: Puzzles, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The puzzle's name and the number, from 0, of the task's question that each example is."""
    for identifier, count in zip(
        puzzles.identifiers.tolist(), np.diff(puzzles.puzzles).tolist(), strict=True
    ):
        yield from ((names[identifier], number) for number in range(count))
