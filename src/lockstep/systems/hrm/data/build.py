"""Builds datasets: the same bytes from the same options, in any process.

(With one version of NumPy: the methods of its generators may draw other numbers in another one.)

What training may see of the test:

- Sudokus that are generated, or read from one CSV file: no solution of the test occurs in training,
  nor any symmetric one (`sudoku_board.py`).
- Mazes that are generated, or read from one CSV file: no maze is in both, nor turned or mirrored.
- A folder with `train.csv` and `test.csv`: the split is that of the files, as it was published.
- ARC, as published: training has all pairs of the training tasks, and the demonstrations of the
  evaluation tasks; the test has the test questions of the evaluation tasks, and of their
  augmentations for the vote. So a model learns an evaluation task's identifier from its
  demonstrations, and its answers are nowhere in training; but the test pair of 070dd51e (version
  1) is also a pair of a training task in the published data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.systems.hrm.data.arc import arc_source
from lockstep.systems.hrm.data.maze import maze_source
from lockstep.systems.hrm.data.sources import Options, Source
from lockstep.systems.hrm.data.sudoku import sudoku_source
from lockstep.systems.hrm.data.writer import SplitSize, new_dataset

_SOURCES: Mapping[str, Callable[[Options], Source]] = {
    "sudoku": sudoku_source,
    "maze": maze_source,
    "arc": arc_source,
}


@dataclass(frozen=True)
class Built:
    """A dataset that has been written.

    Attributes:
        folder: folder of the dataset.
        vocab_size: number of tokens.
        seq_len: tokens of an example.
        num_identifiers: number of puzzle identifiers, the blank one included.
        sizes: size of each split.
    """

    folder: Path
    vocab_size: int
    seq_len: int
    num_identifiers: int
    sizes: Mapping[str, SplitSize]


def source(kind: str, options: Options) -> Source:
    """The source of a dataset's groups.

    Raises:
        ConfigError: an option is invalid, or a package is missing.
        DataError: a CSV file is missing or damaged.
    """
    options.check(kind)
    return _SOURCES[kind](options)


def build(kind: str, folder: Path, options: Options, *, overwrite: bool = False) -> Built:
    """Write a dataset; see `format` and `writer.new_dataset`.

    Args:
        kind: `sudoku`, `maze` or `arc`.
        folder: folder of the dataset.
        options: options of the dataset.
        overwrite: whether a dataset of other content may be replaced.

    Raises:
        ConfigError: an option is invalid, or a package is missing.
        DataError: a CSV file is missing or damaged; the folder holds something else; or it cannot
            be written.
    """
    groups = source(kind, options)
    with new_dataset(folder, groups.vocab_size, groups.seq_len, overwrite=overwrite) as writer:
        for split, group in groups.groups(writer.identifier):
            writer.add(split, group)
    num_identifiers = len(writer.identifiers)
    return Built(folder, groups.vocab_size, groups.seq_len, num_identifiers, writer.sizes)
