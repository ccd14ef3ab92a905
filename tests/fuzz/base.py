"""What a target of the fuzz test is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Call = Callable[[bytes], None]
Made = tuple[list[bytes], Call]
Make = Callable[[Path, Path], Made]


@dataclass(frozen=True)
class Target:
    """Something that reads.

    Attributes:
        name: of it.
        weight: its share of all inputs.
        make: from a folder of its own and the run's, its samples and the call.
        mutate: makes an input of a sample.
    """

    name: str
    weight: int
    make: Make
    mutate: Callable[[random.Random, bytes], bytes]


def one_file(name: str, read: Callable[[Path], object], *samples: bytes) -> Make:
    """A target that reads one file."""

    def make(folder: Path, _: Path) -> Made:
        def call(data: bytes) -> None:
            (folder / name).write_bytes(data)
            read(folder / name)

        return list(samples), call

    return make
