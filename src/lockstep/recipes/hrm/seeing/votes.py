"""Scores of ARC: the answers to all augmentations of a task's question are one vote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.data.arc.augment import invert, parse_name
from lockstep.recipes.hrm.data.arc.tokens import Grid, to_grid
from lockstep.recipes.hrm.data.arc.vote import Answer, vote
from lockstep.recipes.hrm.puzzles import Puzzles
from lockstep.recipes.hrm.seeing.shown import probability


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
