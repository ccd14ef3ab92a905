"""Choosing puzzles for both splits from CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.recipes.hrm.data.draws import Use, keyed
from lockstep.recipes.hrm.data.request import Options, asked
from lockstep.recipes.hrm.data.sample import Pairs, sample

Reads = Callable[[Path], Iterator[Pairs]]
"""Reads a CSV file, block by block."""

Divides = Callable[[Iterator[Pairs]], Iterator[tuple[str, Pairs]]]
"""Gives the split of each puzzle of one file; may leave some out."""

DEFAULT_COUNT = 1000
"""Puzzles of a split, if it is not said how many."""

_SPARE = 8
"""Puzzles that are chosen for each one that is wanted: a quarter or less may be for the test."""


def chosen(options: Options, read: Reads, divide: Divides) -> dict[str, list[Pairs]]:
    """The puzzles of both splits, chosen at random, one in each `Pairs`.

    Args:
        options: says how many, and the file; or the folder with `train.csv` and `test.csv`, of
            whose test all puzzles are taken by default.
        read: reads a file.
        divide: divides the puzzles of a single file, which come in random order.

    Raises:
        DataError: a file is missing or damaged.
        ConfigError: there are fewer puzzles than asked for.
    """
    assert options.csv
    num_train = asked(options.train, DEFAULT_COUNT)
    if options.csv.is_dir():
        counts = {"train": num_train, "test": options.test}
        found = {}
        for number, (split, count) in enumerate(counts.items()):
            path = options.csv / f"{split}.csv"
            pairs = sample(read(path), count, keyed(options.seed, Use.CHOICE, number))
            found[split] = list(_single(pairs))
            _check(path, split, found[split], count or 1)
        return found
    wanted = {"train": num_train, "test": asked(options.test, DEFAULT_COUNT)}
    pool = _SPARE * sum(wanted.values()) + DEFAULT_COUNT
    pairs = sample(read(options.csv), pool, keyed(options.seed, Use.CHOICE))
    found = {split: [] for split in wanted}
    for split, pair in divide(_single(pairs)):
        if len(found[split]) < wanted[split]:
            found[split].append(pair)
        if all(len(found[name]) == count for name, count in wanted.items()):
            break
    for split, count in wanted.items():
        _check(options.csv, split, found[split], count)
    return found


def _single(pairs: Pairs) -> Iterator[Pairs]:
    for number in range(len(pairs)):
        one = slice(number, number + 1)
        yield Pairs(pairs.questions[one], pairs.answers[one])


def _check(path: Path, split: str, found: list[Pairs], count: int) -> None:
    if len(found) < count:
        raise ConfigError(
            f"--{split} {count}: {path} has no more than {len(found)} puzzles for it; ask for fewer"
        )
