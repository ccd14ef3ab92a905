"""`lockstep hrm solve`, `view` and `eval`: the answers of a trained model, and their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.text import Text

from lockstep.config.files import replacing_binary
from lockstep.config.parsing import option_numbers
from lockstep.errors import ConfigError, file_errors
from lockstep.observe.showing.terminal import stdout_console
from lockstep.systems.hrm.data import maze
from lockstep.systems.hrm.puzzles import Indices
from lockstep.systems.hrm.reports import terminal
from lockstep.systems.hrm.reports.page import page, page_folder, write
from lockstep.systems.hrm.reports.rules import Tokens
from lockstep.systems.hrm.reports.scores import (
    Consumer,
    Score,
    SplitAnswers,
    Votes,
    accuracy,
    answer_split,
    by_segments,
)
from lockstep.systems.hrm.reports.trained_model import MOST_SEGMENTS, TrainedModel, load_trained

DEFAULT_ATTEMPTS = 2
"""As ARC's rules allow."""

_BETWEEN = "  |"


def solve(
    run_dir: Path, puzzle: str, checkpoint: str, segments: int | None, early: bool | None
) -> int:
    """Print a puzzle's answer after each segment.

    Args:
        run_dir: run directory.
        puzzle: the puzzle's text, its number in validation as `val:17`, or a file with its text.
        checkpoint: `best`, `latest`, or a step's number.
        segments: number of segments; None for that of the run's evaluations.
        early: whether to end where the puzzle halts; None for the run's `early_halting`.

    Returns:
        The exit code: 0 if the answer is a solution, else 1.

    Raises:
        LockstepError: there is no such run, checkpoint or puzzle.
    """
    run = load_trained(run_dir, checkpoint)
    segments = _num_segments(run, segments)
    early = run.config.early_halting if early is None else early
    given, identifier = _puzzle(run, puzzle)
    answers = run.answers(given.question[None], segments, identifier)
    console = stdout_console()
    in_colours = console.color_system is not None and not console.no_color
    lines, is_solved = terminal.lines(run.kind, given, answers, early, in_colours)
    console.print(Text("\n").join(lines), soft_wrap=True)
    return 0 if is_solved else 1


def view(
    run_dir: Path,
    output: Path | None,
    num: int,
    split: str,
    checkpoint: str,
    segments: int | None,
) -> list[str]:
    """Write a page about a model, and its predictions.

    Args:
        run_dir: run directory.
        output: folder to write to; None for `view` in the run directory.
        num: most puzzles to show.
        split: `val` or `train`.
        checkpoint: `best`, `latest`, or a step's number.
        segments: number of segments; None for that of the run's evaluations.

    Returns:
        Lines about what was written.

    Raises:
        LockstepError: there is no such run, checkpoint or split, or the folder cannot be written.
    """
    run = load_trained(run_dir, checkpoint)
    segments, early = _num_segments(run, segments), run.config.early_halting
    inputs, labels = run.puzzles(split)
    folder = output or run_dir / "view"
    with page_folder(folder):
        found = answer_split(run, inputs, labels, segments, early, num, run.identifiers(split))
        title = f"{run_dir.resolve().name}: puzzles of {split}"
        text = page(title, _facts(run, found, segments), run.kind, found, found.examples(num))
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "inputs": found.inputs, "labels": found.labels, "predictions": found.predictions,
            "segments": found.segments, "q_halt": found.q_halt,
        }  # fmt: skip
        paths = write(folder, text, arrays)
    return [*(f"wrote {path}" for path in paths), *run.warnings]


def evaluate(
    run_dir: Path,
    segments: str,
    early: bool,
    subset: int | None,
    attempts: int | None,
    without_ids: bool,
    save: Path | None,
    checkpoint: str,
) -> list[str]:
    """A table of scores on validation puzzles, for each number of segments.

    Args:
        run_dir: run directory.
        segments: numbers of segments, with commas between them.
        early: whether puzzles halt by themselves.
        subset: number of puzzles to solve, or of ARC's tasks, from the first; None for all.
        attempts: number of attempts at a question of ARC; None for 2.
        without_ids: whether to also solve the puzzles without their identifiers.
        save: file for the answers; None for none.
        checkpoint: `best`, `latest`, or a step's number.

    Raises:
        LockstepError: there is no such run or checkpoint, a number is invalid, an option does not
            fit the run, or the file cannot be written.
    """
    numbers = option_numbers("--segments", segments, MOST_SEGMENTS)
    run = load_trained(run_dir, checkpoint)
    is_arc = run.kind.name == "arc"
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise ConfigError(f"--save {save}: name a file in a folder that is there")
    if attempts is not None and not is_arc:
        raise ConfigError(
            f"--attempts {attempts}: is for ARC, where answers are voted on; leave it out"
        )
    if without_ids and not run.config.puzzle_ids:
        raise ConfigError(
            "--no-id: the run's model does not ask for identifiers (puzzle_ids); leave it out"
        )
    tries = sorted({1, attempts or DEFAULT_ATTEMPTS}) if is_arc else []
    count = _count(run, subset, is_arc)
    inputs, labels = (tokens[:count] for tokens in run.puzzles("val"))
    identifiers = run.identifiers("val")
    found = [
        _evaluation(run, (inputs, labels), numbers, early, tries, ids, save is not None)
        for ids in ([identifiers, None] if without_ids else [identifiers])
    ]
    lines = [f"{found[0].counts}{count:,} puzzles of val, checkpoint of step {run.step:,}"]
    lines += _table(numbers, found, tries, early)
    if save is not None:
        _save(save, run, numbers, (inputs, labels), found)
        lines.append(f"wrote {save}")
    return [*lines, *run.warnings]


def _num_segments(run: TrainedModel, segments: int | None) -> int:
    """The number of segments that is requested, or that of the run's evaluations.

    Raises:
        ConfigError: it is too small or too large.
    """
    segments = run.config.eval_segments if segments is None else segments
    if not 1 <= segments <= MOST_SEGMENTS:
        raise ConfigError(f"--segments {segments}: must be from 1 to {MOST_SEGMENTS}")
    return segments


def _puzzle(run: TrainedModel, given: str) -> tuple[terminal.Puzzle, Indices | None]:
    """A puzzle, and its identifier, int64 [1]; None if it has none, or an unknown one."""
    inputs, labels = run.puzzles("val")
    index = terminal.numbered(given, len(inputs))
    if index is not None:
        identifiers = run.identifiers("val")
        known = None if identifiers is None else identifiers[index : index + 1]
        return terminal.Puzzle(inputs[index], labels[index]), known
    text, where = terminal.given_text(given)
    question = terminal.parse(text, run.kind, where)
    label = maze.solved(question, run.kind.rows) if run.kind.name == "maze" else None
    return terminal.Puzzle(question, label), None


def _facts(run: TrainedModel, found: SplitAnswers, segments: int) -> dict[str, str]:
    """The figures at the top of a page."""
    parts = accuracy(found.predictions, found.labels)
    ends = "halting early" if run.config.early_halting else f"after {segments} segments"
    return {
        f"exact, {ends}": f"{(parts == 1).mean():.2%}",
        f"accuracy, {ends}": f"{parts.mean():.2%}",
        "mean segments until halting": f"{found.segments.mean():.2f}",
        "puzzles": f"{len(found.inputs):,}",
        "kind": run.kind.name,
        "model": run.config.model,
        "checkpoint": f"step {run.step:,}",
    }


@dataclass(frozen=True)
class _Evaluation:
    """Scores with the identifiers of puzzles, or without.

    Attributes:
        scores: for each number of segments.
        passes: for each number of segments and of attempts, the fraction of ARC's tasks solved.
        tokens: answers [K, N, cells]; empty if they are not saved.
        q_halt: logits of halting [K, N]; empty if they are not saved.
        counts: numbers of tasks and questions that were voted on, as text; empty if not ARC.
    """

    scores: list[Score]
    passes: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.uint8]
    q_halt: npt.NDArray[np.float32]
    counts: str


def _evaluation(
    run: TrainedModel,
    puzzles: tuple[Tokens, Tokens],
    numbers: Sequence[int],
    early: bool,
    attempts: Sequence[int],
    identifiers: Indices | None,
    keeps: bool,
) -> _Evaluation:
    segments: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]] = []

    def keep(_: slice, tokens: npt.NDArray[np.uint8], q_halt: npt.NDArray[np.float32]) -> None:
        segments.append((tokens, q_halt))

    consumers: list[Consumer] = [keep] if keeps else []
    votes = None
    if attempts:
        votes = Votes(run.task.puzzles["val"], run.task.names, len(numbers), attempts)
        consumers.append(votes.add)
    scores = by_segments(run, *puzzles, numbers, early, identifiers, consumers)
    return _Evaluation(
        scores,
        votes.passes if votes is not None else np.zeros((len(numbers), 0)),
        np.concatenate([t for t, _ in segments], 1) if keeps else np.zeros(0, np.uint8),
        np.concatenate([q for _, q in segments], 1) if keeps else np.zeros(0, np.float32),
        f"{votes.num_tasks:,} tasks, {votes.num_questions:,} questions, " if votes else "",
    )


def _count(run: TrainedModel, subset: int | None, is_arc: bool) -> int:
    """The number of examples to solve; a group of ARC is a task."""
    puzzles = run.task.puzzles["val"]
    if subset is None:
        return len(puzzles.inputs)
    if is_arc:
        return int(puzzles.puzzles[puzzles.groups[min(subset, len(puzzles.groups) - 1)]])
    return min(subset, len(puzzles.inputs))


def _table(
    numbers: Sequence[int], found: Sequence[_Evaluation], attempts: Sequence[int], early: bool
) -> Iterator[str]:
    """Scores by number of segments; those without identifiers are beside the others."""
    head = f"  {'exact':>8}  {'accuracy':>8}" + "".join(f"  {f'pass@{n}':>8}" for n in attempts)
    head += "  mean segments" * early
    if len(found) > 1:
        yield f"{'':8}  {'with identifiers':<{len(head) - 2}}{_BETWEEN}  without identifiers"
    yield f"{'segments':>8}" + _BETWEEN.join([head] * len(found))
    for index, most in enumerate(numbers):
        cells = []
        for one in found:
            score = one.scores[index]
            cell = f"  {score.exact:8.4f}  {score.accuracy:8.4f}"
            cell += "".join(f"  {part:8.4f}" for part in one.passes[index].tolist())
            cells.append(cell + f"  {score.segments:13.2f}" * early)
        yield f"{most:8}" + _BETWEEN.join(cells)


def _save(
    path: Path,
    run: TrainedModel,
    numbers: Sequence[int],
    puzzles: tuple[Tokens, Tokens],
    found: Sequence[_Evaluation],
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
    identifiers = run.task.puzzles["val"].example_identifiers[: len(inputs)]
    if run.config.puzzle_ids:
        arrays["identifiers"] = identifiers
    if run.kind.name == "arc":
        arrays["names"] = np.array(run.task.names)[identifiers]
    with file_errors(ConfigError, f"--save {path}"), replacing_binary(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
