"""What a dataset is asked to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from lockstep.errors import ConfigError
from lockstep.systems.hrm.data.writer import Puzzle

Group = tuple[str, list[Puzzle]]
"""A split, and a group of it."""

NamesIdentifier = Callable[[str], int]
"""Takes the name of a new puzzle identifier; gives its number."""


class OptionError(ConfigError):
    """An option that cannot be, or does not fit the kind.

    Attributes:
        option: its name, a field of `Options`.
        value: its value.
        what: what is wrong with it.
    """

    def __init__(self, option: str, value: object, what: str) -> None:
        super().__init__(f"--{option} {value}: {what}")
        self.option, self.value, self.what = option, value, what


@dataclass(frozen=True)
class Options:
    """What is asked for beside the kind; None leaves it to the kind.

    Attributes:
        size: rows of a Sudoku (4, 6 or 9; 4 by default) or of a maze (30).
        train: number of training puzzles, or of ARC's training tasks.
        test: number of test puzzles, or of ARC's evaluation tasks.
        augment: augmentations of each training puzzle (of ARC: of each task).
        seed: seed of all draws, from 0 to 2^63 - 1.
        csv: a CSV file of the public form, or a folder with `train.csv` and `test.csv`.
        rating: least rating of puzzles.
        clues: number of clues to stop at when a Sudoku is made; 0 for minimal ones.
        version: 1 or 2, of ARC-AGI.
    """

    size: int | None = None
    train: int | None = None
    test: int | None = None
    augment: int | None = None
    seed: int = 0
    csv: Path | None = None
    rating: int | None = None
    clues: int | None = None
    version: int | None = None


@dataclass(frozen=True)
class Source:
    """Where the groups of a dataset come from.

    Attributes:
        vocab_size: number of tokens, padding included.
        seq_len: tokens of an example.
        total: number of groups.
        groups: makes the groups, in their order; is given what numbers new identifiers.
    """

    vocab_size: int
    seq_len: int
    total: int
    groups: Callable[[NamesIdentifier], Iterator[Group]]


_KNOWN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "sudoku": frozenset({"size", "train", "test", "augment", "csv", "rating", "clues"}),
        "maze": frozenset({"size", "train", "test", "augment", "csv", "rating"}),
        "arc": frozenset({"train", "test", "augment", "version"}),
    }
)
"""The options of each kind, beside the seed."""

KINDS = tuple(_KNOWN)
"""Kinds of datasets."""


def check_options(kind: str, options: Options) -> None:
    """Make sure that options are those of a kind.

    Raises:
        ConfigError: there is no such kind, it has no such option, or a number is too small.
    """
    if kind not in _KNOWN:
        raise ConfigError(f"kind {kind!r}: must be one of {', '.join(KINDS)}")
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None or field.name == "seed":
            continue
        if field.name not in _KNOWN[kind]:
            raise OptionError(field.name, value, f"is not for {kind}; leave it out")
        least = 1 if field.name in ("size", "train", "test") else 0
        if isinstance(value, int) and value < least:
            raise OptionError(field.name, value, f"must be at least {least}")
    if options.csv and options.clues is not None:
        raise ConfigError(f"--clues {options.clues}: is for puzzles that are made, not for --csv")
    if not 0 <= options.seed < 1 << 63:
        raise OptionError("seed", options.seed, "must be from 0 to 2^63 - 1")


def asked(value: int | None, default: int) -> int:
    """The value of an option."""
    return default if value is None else value
