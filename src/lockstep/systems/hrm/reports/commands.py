"""`lockstep hrm solve` and `view`: what a trained model does with single puzzles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.text import Text

from lockstep.errors import ConfigError
from lockstep.observe.showing.terminal import stdout_console
from lockstep.systems.hrm.puzzles import Indices
from lockstep.systems.hrm.reports import shown
from lockstep.systems.hrm.reports.gathered import Gathered, folder_for_page, gather, write
from lockstep.systems.hrm.reports.kinds import Tokens, solved_maze
from lockstep.systems.hrm.reports.page import page
from lockstep.systems.hrm.reports.shown import given_text, numbered, parsed
from lockstep.systems.hrm.reports.trained import MOST_SEGMENTS, Trained, trained


@dataclass(frozen=True)
class Chosen:
    """What is common to the commands.

    Attributes:
        run_dir: run directory.
        checkpoint: `best`, `latest`, or a step's number.
        segments: number of segments; None for that of the run's evaluations.
        early: whether puzzles halt by themselves; None: as in the run's evaluations.
    """

    run_dir: Path
    checkpoint: str = "latest"
    segments: int | None = None
    early: bool | None = None

    def of(self, run: Trained) -> tuple[int, bool]:
        """Number of segments, and whether puzzles halt by themselves.

        Raises:
            ConfigError: there are too few segments or too many.
        """
        segments = run.config.eval_segments if self.segments is None else self.segments
        if not 1 <= segments <= MOST_SEGMENTS:
            raise ConfigError(f"--segments {segments}: must be from 1 to {MOST_SEGMENTS}")
        return segments, run.config.early_halting if self.early is None else self.early


def solve(chosen: Chosen, given: str) -> int:
    """Print a puzzle's answer after each segment.

    Args:
        chosen: which model, and how long.
        given: the puzzle's text, its number in validation as `val:17`, or a file with its text.

    Returns:
        The exit code: 0 if the answer is a solution, else 1.

    Raises:
        LockstepError: there is no such run, checkpoint or puzzle.
    """
    run = trained(chosen.run_dir, chosen.checkpoint)
    segments, early = chosen.of(run)
    puzzle, identifier = _puzzle(run, given)
    answers = run.answers(puzzle.question[None], segments, identifier)
    console = stdout_console()
    in_colours = console.color_system is not None and not console.no_color
    lines, is_solved = shown.lines(run.kind, puzzle, answers, early, in_colours)
    console.print(Text("\n").join(lines), soft_wrap=True)
    return 0 if is_solved else 1


def view(chosen: Chosen, output: Path | None, num: int, split: str) -> list[str]:
    """Write a page about a model, and its predictions.

    Args:
        chosen: which model, and how long.
        output: folder to write to; None for `view` in the run directory.
        num: how many puzzles to show at most.
        split: `val` or `train`.

    Returns:
        Lines that say what was written.

    Raises:
        LockstepError: there is no such run, checkpoint or split, or the folder cannot be written.
    """
    run = trained(chosen.run_dir, chosen.checkpoint)
    segments, early = chosen.of(run)
    inputs, labels = run.puzzles(split)
    folder = output or chosen.run_dir / "view"
    with folder_for_page(folder):
        found = gather(run, inputs, labels, segments, early, num, run.identifiers(split))
        title = f"{_name(chosen.run_dir)}: puzzles of {split}"
        facts = _facts(run, found, segments, early)
        text = page(title, facts, run.kind, found, found.shown(num))
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "inputs": found.inputs, "labels": found.labels, "predictions": found.predictions,
            "segments": found.segments, "q_halt": found.q_halt,
        }  # fmt: skip
        paths = write(folder, text, arrays)
    return [*(f"wrote {path}" for path in paths), *run.warnings]


def _puzzle(run: Trained, given: str) -> tuple[shown.Puzzle, Indices | None]:
    """A puzzle, and its identifier, int64 [1]; None for one that has none, or is unknown."""
    inputs, labels = run.puzzles("val")
    index = numbered(given, len(inputs))
    if index is not None:
        identifiers = run.identifiers("val")
        known = None if identifiers is None else identifiers[index : index + 1]
        return shown.Puzzle(inputs[index], labels[index]), known
    text, where = given_text(given)
    question = parsed(text, run.kind, where)
    label: Tokens | None = None
    if run.kind.name == "maze":
        label = solved_maze(question, run.kind.rows)
    return shown.Puzzle(question, label), None


def _name(run_dir: Path) -> str:
    return run_dir.resolve().name


def _facts(run: Trained, found: Gathered, segments: int, early: bool) -> dict[str, str]:
    """What a page says first."""
    count = len(found.inputs)
    ends = "halting early" if early else f"after {segments} segments"
    return {
        f"exact, {ends}": f"{(found.parts == 1).mean():.2%}",
        f"accuracy, {ends}": f"{found.parts.mean():.2%}",
        "mean segments until halting": f"{found.segments.mean():.2f}",
        "puzzles": f"{count:,}",
        "kind": run.kind.name,
        "model": run.config.model,
        "checkpoint": f"step {run.step:,}",
    }
