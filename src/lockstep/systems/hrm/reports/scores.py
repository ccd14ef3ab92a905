"""How good answers are after each number of segments, and by votes of ARC's augmentations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.systems.hrm.data.arc import Answer, invert, parse_name, vote
from lockstep.systems.hrm.data.arc_tasks import Grid, to_grid
from lockstep.systems.hrm.puzzles import Indices, Puzzles
from lockstep.systems.hrm.reports.kinds import Tokens
from lockstep.systems.hrm.reports.shown import probability
from lockstep.systems.hrm.reports.trained import Answers, Trained

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


@dataclass(frozen=True)
class Asked:
    """What an example asks.

    Attributes:
        name: name of its puzzle's identifier, which says how it was augmented.
        task: name of the task.
        number: number of the test question, from 0.
    """

    name: str
    task: str
    number: int


@dataclass
class Ballot:
    """The votes on one question.

    Attributes:
        truth: the right answer, colours [rows, columns].
        answers: those that are given, for each number of segments.
    """

    truth: Grid
    answers: list[list[Answer]] = field(default_factory=list)

    def is_right(self, number: int, attempts: int) -> bool:
        """Whether the right answer is among the first so many of the vote's ranking."""
        ranked = vote(self.answers[number])[:attempts]
        return any(np.array_equal(candidate.grid, self.truth) for candidate in ranked)


class Votes:
    """Counts the answers to a dataset's test, task by task.

    A group of the dataset is a task with its augmentations. Its votes are counted as soon as all of
    them are in, so that no more than a task's are kept.

    Attributes:
        num_tasks: number of tasks whose votes are counted.
        num_questions: number of their questions.
    """

    def __init__(
        self, puzzles: Puzzles, names: Sequence[str], num_numbers: int, attempts: Sequence[int]
    ) -> None:
        """Begin to count.

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
        self._asked = _asked(puzzles, names)
        self._open: dict[tuple[str, int], Ballot] = {}
        self._sums = np.zeros((num_numbers, len(attempts)))
        self.num_tasks = self.num_questions = 0

    def take(
        self, which: slice, tokens: npt.NDArray[np.uint8], q_halt: npt.NDArray[np.float32]
    ) -> None:
        """Take the answers to a batch, see `scores.Takes`.

        Raises:
            DataError: an identifier's name is no augmentation's.
        """
        labels = self._puzzles.labels[which].numpy()
        for place, example in enumerate(range(which.start, which.stop)):
            asked = next(self._asked)
            ballot = self._open.get((asked.task, asked.number))
            if ballot is None:
                truth = invert(asked.name, to_grid(labels[place]))
                ballot = Ballot(truth, [[] for _ in range(self._num_numbers)])
                self._open[asked.task, asked.number] = ballot
            for answers, answer, logit in zip(
                ballot.answers, tokens[:, place], q_halt[:, place], strict=True
            ):
                answers.append(Answer(asked.name, to_grid(answer), probability(float(logit))))
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
        """Part of the tasks that is solved in so many attempts: [K, attempts].

        Of a task with several questions, the part of them whose right answer is among the attempts.
        """
        return self._sums / max(self.num_tasks, 1)


def _asked(puzzles: Puzzles, names: Sequence[str]) -> Iterator[Asked]:
    """What each example asks; those of a puzzle are in the order of the task's tests."""
    for identifier, count in zip(
        puzzles.identifiers.tolist(), np.diff(puzzles.puzzles).tolist(), strict=True
    ):
        name = names[identifier]
        task, _ = parse_name(name)
        yield from (Asked(name, task, number) for number in range(count))
