"""Building datasets: the same bytes from the same request, in any process.

(With one version of NumPy: its generators' methods may draw other numbers in another one.)

Splits, and what may be learned from:

- Sudoku that is generated, or read from one CSV file: no solution of the test occurs in training,
  nor anything that augmentations make of it (`sudoku/split.py`).
- Mazes that are generated, or read from one CSV file: no maze is in both, nor turned or mirrored.
- A folder with `train.csv` and `test.csv`: the split is that of the files, as it was published.
- ARC, as published: training has all pairs of the training tasks, and the demonstrations of the
  evaluation tasks; the test has the test questions of the evaluation tasks, and of their
  augmentations for the vote. So a model learns an evaluation task's identifier from its
  demonstrations, and its answers are nowhere in training; but the test pair of 070dd51e (version
  1) is a pair of a training task too, in what is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lockstep.systems.hrm.data.arc import arc_source
from lockstep.systems.hrm.data.maze import maze_source
from lockstep.systems.hrm.data.request import Options, Source, check_options
from lockstep.systems.hrm.data.sudoku.groups import sudoku_source
from lockstep.systems.hrm.data.writer import SplitSize, new_dataset

Progress = Callable[[int, int], None]
"""Is told how many groups are made, and how many there will be."""

_SOURCES: Mapping[str, Callable[[Options], Source]] = MappingProxyType(
    {"sudoku": sudoku_source, "maze": maze_source, "arc": arc_source}
)


@dataclass(frozen=True)
class Built:
    """A dataset that has been written.

    Attributes:
        folder: folder of the dataset.
        vocab_size: number of tokens.
        seq_len: tokens of an example.
        num_identifiers: number of puzzle identifiers, the blank one included.
        sizes: how much each split holds.
    """

    folder: Path
    vocab_size: int
    seq_len: int
    num_identifiers: int
    sizes: Mapping[str, SplitSize]


def source(kind: str, options: Options) -> Source:
    """Where the groups of a dataset come from.

    Raises:
        ConfigError: an option is not usable, or a package is missing.
        DataError: a CSV file is missing or damaged.
    """
    check_options(kind, options)
    return _SOURCES[kind](options)


def build(
    kind: str,
    folder: Path,
    options: Options | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Built:
    """Write a dataset; see `format` and `writer.new_dataset`.

    Args:
        kind: `sudoku`, `maze` or `arc`.
        folder: folder of the dataset.
        options: what is asked for.
        overwrite: whether a dataset of other content may be replaced.
        progress: called after each group.

    Raises:
        ConfigError: an option is not usable, or a package is missing.
        DataError: a CSV file is missing or damaged; the folder holds something else; or it cannot
            be written.
    """
    options = options or Options()
    found = source(kind, options)
    with new_dataset(folder, found.vocab_size, found.seq_len, overwrite=overwrite) as writer:
        for number, (split, group) in enumerate(found.groups(writer.identifier), start=1):
            writer.add(split, group)
            if progress:
                progress(number, found.total)
    return Built(
        Path(folder), found.vocab_size, found.seq_len, len(writer.identifiers), writer.sizes
    )
