"""`lockstep hrm eval`: scores by number of segments, and the answers behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.files import replacing_binary
from lockstep.config.parsing import parse_int
from lockstep.errors import ConfigError
from lockstep.systems.hrm.puzzles import Indices
from lockstep.systems.hrm.reports.commands import Chosen
from lockstep.systems.hrm.reports.kinds import Tokens
from lockstep.systems.hrm.reports.scores import Score, Takes, Votes, by_segments
from lockstep.systems.hrm.reports.trained import MOST_SEGMENTS, Trained, trained

DEFAULT_ATTEMPTS = 2
"""As ARC's rules allow."""

_BETWEEN = "  |"


@dataclass(frozen=True)
class Asking:
    """What is asked of an evaluation.

    Attributes:
        numbers: numbers of segments, with commas between them.
        subset: how many puzzles to solve, or ARC's tasks, from the first; None for all.
        attempts: how many answers to a question of ARC may be wrong but one; None for 2.
        without_ids: whether to solve the puzzles without their identifiers, too.
        save: file for the answers; None for none.
    """

    numbers: str
    subset: int | None = None
    attempts: int | None = None
    without_ids: bool = False
    save: Path | None = None


@dataclass(frozen=True)
class Scored:
    """Scores with the identifiers of puzzles, or without.

    Attributes:
        scores: for each number of segments.
        passes: for each number of segments and of attempts: part of ARC's tasks that is solved.
        tokens: answers [K, N, cells]; empty if they are not kept.
        q_halt: logits of halting [K, N]; empty if they are not kept.
        counted: what the votes were on, for people; empty for other puzzles.
    """

    scores: list[Score]
    passes: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.uint8]
    q_halt: npt.NDArray[np.float32]
    counted: str


class Kept:
    """Keeps all answers.

    Attributes:
        tokens: answers [K, B, cells], by batch.
        q_halt: logits of halting [K, B], by batch.
    """

    def __init__(self) -> None:
        self.tokens: list[npt.NDArray[np.uint8]] = []
        self.q_halt: list[npt.NDArray[np.float32]] = []

    def take(
        self, which: slice, tokens: npt.NDArray[np.uint8], q_halt: npt.NDArray[np.float32]
    ) -> None:
        """Take the answers to a batch, see `scores.Takes`."""
        self.tokens.append(tokens)
        self.q_halt.append(q_halt)


def evaluate(chosen: Chosen, asking: Asking) -> list[str]:
    """A table of scores on validation puzzles, for each number of segments.

    Args:
        chosen: which model, and whether puzzles halt by themselves.
        asking: what to score.

    Raises:
        LockstepError: there is no such run or checkpoint, a number is none, something is asked that
            the run does not have, or the file cannot be written.
    """
    numbers = _numbers(asking.numbers)
    run = trained(chosen.run_dir, chosen.checkpoint)
    is_arc = run.kind.name == "arc"
    _check(asking, run, is_arc)
    attempts = sorted({1, asking.attempts or DEFAULT_ATTEMPTS}) if is_arc else []
    inputs, labels = run.puzzles("val")
    count = _count(run, asking.subset, is_arc)
    inputs, labels, early = inputs[:count], labels[:count], bool(chosen.early)
    identifiers = run.identifiers("val")
    known = [identifiers, None] if asking.without_ids else [identifiers]
    keeps = asking.save is not None
    found = [_scored(run, (inputs, labels), numbers, early, attempts, one, keeps) for one in known]
    lines = [f"{found[0].counted}{count:,} puzzles of val, checkpoint of step {run.step:,}"]
    lines += _table(numbers, found, attempts, early)
    if asking.save is not None:
        _save(asking.save, run, numbers, (inputs, labels), found)
        lines.append(f"wrote {asking.save}")
    return [*lines, *run.warnings]


def _scored(
    run: Trained,
    puzzles: tuple[Tokens, Tokens],
    numbers: Sequence[int],
    early: bool,
    attempts: Sequence[int],
    identifiers: Indices | None,
    keeps: bool,
) -> Scored:
    kept, votes = Kept(), None
    takers: list[Takes] = [kept] if keeps else []
    if attempts:
        votes = Votes(run.task.puzzles["val"], run.task.names, len(numbers), attempts)
        takers.append(votes)
    scores = by_segments(run, *puzzles, numbers, early, identifiers, takers)
    return Scored(
        scores,
        votes.passes if votes is not None else np.zeros((len(numbers), 0)),
        np.concatenate(kept.tokens, 1) if keeps else np.zeros(0, np.uint8),
        np.concatenate(kept.q_halt, 1) if keeps else np.zeros(0, np.float32),
        f"{votes.num_tasks:,} tasks, {votes.num_questions:,} questions, " if votes else "",
    )


def _check(asking: Asking, run: Trained, is_arc: bool) -> None:
    """Refuse what cannot be, or what the run does not have.

    Raises:
        ConfigError: naming the option.
    """
    if asking.save is not None and (asking.save.is_dir() or not asking.save.parent.is_dir()):
        raise ConfigError(f"--save {asking.save}: name a file in a folder that is there")
    if asking.attempts is not None and not is_arc:
        raise ConfigError(
            f"--attempts {asking.attempts}: is for ARC, where answers are voted on; leave it out"
        )
    if asking.without_ids and not run.config.puzzle_ids:
        raise ConfigError(
            "--no-id: the run's model does not ask for identifiers (puzzle_ids); leave it out"
        )


def _count(run: Trained, subset: int | None, is_arc: bool) -> int:
    """How many examples to solve; of ARC a group is a task."""
    puzzles = run.task.puzzles["val"]
    if subset is None:
        return len(puzzles.inputs)
    if is_arc:
        return int(puzzles.puzzles[puzzles.groups[min(subset, len(puzzles.groups) - 1)]])
    return min(subset, len(puzzles.inputs))


def _table(
    numbers: Sequence[int], found: Sequence[Scored], attempts: Sequence[int], early: bool
) -> Iterator[str]:
    """Scores by number of segments; those without identifiers stand beside the others."""
    head = f"  {'exact':>8}  {'accuracy':>8}" + "".join(f"  {f'pass@{n}':>8}" for n in attempts)
    head += "  mean segments" * early
    if len(found) > 1:
        width = len(head)
        yield f"{'':8}  {'with identifiers':<{width - 2}}{_BETWEEN}  without identifiers"
    yield f"{'segments':>8}" + _BETWEEN.join([head] * len(found))
    for place, most in enumerate(numbers):
        cells = []
        for one in found:
            score = one.scores[place]
            cell = f"  {score.exact:8.4f}  {score.accuracy:8.4f}"
            cell += "".join(f"  {part:8.4f}" for part in one.passes[place].tolist())
            cells.append(cell + f"  {score.segments:13.2f}" * early)
        yield f"{most:8}" + _BETWEEN.join(cells)


def _save(
    path: Path,
    run: Trained,
    numbers: Sequence[int],
    puzzles: tuple[Tokens, Tokens],
    found: Sequence[Scored],
) -> None:
    """Write answers; the same bytes from the same values.

    Raises:
        ConfigError: they cannot be written.
    """
    inputs, labels = puzzles
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "segments": np.array(numbers), "inputs": inputs, "labels": labels,
        "predictions": found[0].tokens, "q_halt": found[0].q_halt,
    }  # fmt: skip
    if len(found) > 1:
        arrays |= {"predictions_no_id": found[1].tokens, "q_halt_no_id": found[1].q_halt}
    identifiers = run.task.puzzles["val"].of_examples[: len(inputs)]
    if run.config.puzzle_ids:
        arrays["identifiers"] = identifiers
    if run.kind.name == "arc":
        arrays["names"] = np.array(run.task.names)[identifiers]
    try:
        with replacing_binary(path) as file:
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise ConfigError(f"--save {path}: cannot be written: {error.strerror}") from None


def _numbers(text: str) -> list[int]:
    """Numbers of segments, in order.

    Raises:
        ConfigError: one of them is none.
    """
    try:
        return sorted({parse_int(item, least=1, most=MOST_SEGMENTS) for item in text.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"--segments {text}: {error}; give numbers from 1 to {MOST_SEGMENTS} with commas "
            "between them"
        ) from None
