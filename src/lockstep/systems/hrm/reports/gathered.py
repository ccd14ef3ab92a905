"""All that a page says of a split, gathered batch by batch, and its folder."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.files import leftovers, replacing, replacing_binary
from lockstep.errors import ConfigError
from lockstep.systems.hrm.puzzles import Indices
from lockstep.systems.hrm.reports.kinds import Tokens
from lockstep.systems.hrm.reports.scores import accuracy, final_segments
from lockstep.systems.hrm.reports.trained import Answers, Trained

PAGE_FILE = "index.html"
ARRAYS_FILE = "predictions.npz"


@contextmanager
def folder_for_page(folder: Path) -> Iterator[None]:
    """Have a folder to write a page to; one that was made is gone if no page comes.

    Raises:
        ConfigError: it cannot be made, or has other files than those of a page.
    """
    was_there = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check(folder)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be made: {error.strerror}") from None
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise


def write(folder: Path, page: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> list[Path]:
    """Write a page and its arrays, both or neither; the same bytes from the same values.

    Raises:
        ConfigError: they cannot be written.
    """
    paths = [folder / PAGE_FILE, folder / ARRAYS_FILE]
    try:
        # Files of .npz are dated 1980, whenever they are written.
        with replacing(paths[0]) as text, replacing_binary(paths[1]) as binary:
            np.savez(binary, allow_pickle=False, **arrays)
            text.write(page)
            text.flush()
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error.strerror}") from None
    return paths


def _check(folder: Path) -> None:
    mine = {folder / PAGE_FILE, folder / ARRAYS_FILE}
    others = sorted(
        path.name
        for path in {*folder.iterdir()} - {*leftovers(folder)}
        if path not in mine or not stat.S_ISREG(path.lstat().st_mode)
    )
    if others:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise ConfigError(
            f"--output {folder}: holds what is not of a page ({names}); name a new folder"
        )


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
