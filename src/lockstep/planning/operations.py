"""The operations and sizes of a communication profile, and lines fitted to its times.

The model is Hockney's (R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20,
1994). Times of one profile differ by five orders of magnitude, so relative errors are made small:
sum over sizes of ((alpha + beta * bytes) / seconds - 1)^2, with alpha and beta of at least 0.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError

Layer = Literal["lockstep", "torch"]
"""The library that is measured: Lockstep's transport and engine, or `torch.distributed`."""


@dataclass(frozen=True)
class Operation:
    """A collective or a message.

    Attributes:
        layer: library that is measured.
        name: name of it, unique in its layer.
        meaning: what is done, and what its size refers to.
        factor: function from the number of ranks to bus bandwidth over algorithm bandwidth: the
            part of the size that goes in or out of the busiest rank.
        has_size: whether the caller chooses how much it moves.
        least_bytes: least size that it can have.
        most_bytes: greatest size that it is measured with.
        copies: memory that a rank needs, as a multiple of the size.
    """

    layer: Layer
    name: str
    meaning: str
    factor: Callable[[int], float]
    has_size: bool = True
    least_bytes: int = 1
    most_bytes: int = 1 << 62
    copies: int = 2

    @property
    def key(self) -> str:
        """Its name among those of both layers."""
        return f"{self.layer}/{self.name}"


def _whole(num_ranks: int) -> float:
    return 1.0


def _of_others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


def _of_others_uneven(num_ranks: int) -> float:
    # Rank 0 has two of n + 1 parts; a rank that has one gets all others.
    return num_ranks / (num_ranks + 1)


def _nothing(num_ranks: int) -> float:
    return 0.0


_ALL = (
    Operation(
        "lockstep", "ordered_sum",
        "a gradient of this size summed in the canonical order of microbatches, for all ranks",
        _twice, least_bytes=4096, copies=4,
    ),
    Operation(
        "lockstep", "all_gather", "equal parts of all ranks, together of this size, for all ranks",
        _of_others,
    ),
    Operation(
        "lockstep", "all_gather_uneven",
        "the same, but rank 0's part is twice as large as the others'", _of_others_uneven, copies=4,
    ),
    Operation(
        "lockstep", "all_to_all", "each rank sends this size, the same part of it to each rank",
        _of_others,
    ),
    Operation(
        "lockstep", "to_next", "each rank sends this size to the next one, by an all-to-all",
        _whole,
    ),
    Operation("lockstep", "broadcast", "rank 0's tensor of this size, for all ranks", _whole),
    Operation(
        "lockstep", "message", "a tensor of this size from one rank to another: half of there and "
        "back", _whole,
    ),
    Operation(
        "lockstep", "gather_json", "equal texts of all ranks, together of this size, as JSON",
        _of_others, most_bytes=64 << 10, copies=8,
    ),
    Operation("lockstep", "barrier", "all ranks have come", _nothing, has_size=False),
    Operation(
        "lockstep", "agree", "all ranks know that all have come", _nothing, has_size=False
    ),
    Operation("torch", "all_reduce", "the sum of all ranks' tensors of this size", _twice),
    Operation(
        "torch", "all_gather", "equal parts of all ranks, together of this size, for all ranks",
        _of_others,
    ),
    Operation(
        "torch", "reduce_scatter", "the sum of all ranks' tensors of this size, a part for each "
        "rank", _of_others, copies=3,
    ),
    Operation(
        "torch", "all_to_all", "each rank sends this size, the same part of it to each rank",
        _of_others,
    ),
    Operation("torch", "broadcast", "rank 0's tensor of this size, for all ranks", _whole),
    Operation(
        "torch", "send_recv", "a tensor of this size from one rank to another: half of there and "
        "back", _whole,
    ),
    Operation("torch", "barrier", "all ranks have come", _nothing, has_size=False),
)  # fmt: skip

OPERATIONS: Mapping[str, Operation] = MappingProxyType({one.key: one for one in _ALL})
"""Everything that is measured, by key, in the order of the tables."""


FACTOR = 4
"""From one size of a range to the next."""
DEFAULT = "1KB:256MB"
MOST_BYTES = 16 << 30

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,11})\s*([KMG]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes that the option `--sizes` means, in bytes, ascending.

    Args:
        text: `FIRST:LAST`, which stands for FIRST, four times as much, and so on, and LAST; or
            sizes with commas between them. A size is a whole number with KB, MB or GB behind it,
            of 1,024 bytes and its powers, or of bytes.

    Raises:
        ConfigError: it is not that, or a size is 0 or more than 16 GB.
    """
    if ":" not in text:
        return tuple(sorted({_parse(part, text) for part in text.split(",")}))
    first_text, _, last_text = text.partition(":")
    size, last = _parse(first_text, text), _parse(last_text, text)
    if size > last:
        raise _wrong(text, "the first size is larger than the last")
    sizes = []
    while size < last:
        sizes.append(size)
        size *= FACTOR
    return (*sizes, last)


def size_text(num_bytes: int) -> str:
    """A size as people write it and as `parse_sizes` reads it, such as `64KB`."""
    for unit in ("G", "M", "K"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}B"
    return f"{num_bytes}B"


def _parse(part: str, text: str) -> int:
    match = _SIZE.fullmatch(part.strip())
    if match is None:
        raise _wrong(text, f"{shown(part)} is no size")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size <= MOST_BYTES:
        raise _wrong(text, f"{shown(part)} is not between 1 byte and {size_text(MOST_BYTES)}")
    return size


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--sizes {shown(text)[1:-1]}: {why}; write a range such as {DEFAULT}, or sizes such as "
        "1KB,64KB"
    )


_TAIL = 0.99


@dataclass(frozen=True)
class Point:
    """One size of one operation.

    Attributes:
        num_bytes: its size, see `Operation.meaning`; 0 where it has none.
        num_samples: number of calls that were timed.
        min_s: seconds of the fastest call. Those of a call are the slowest rank's.
        median_s: their median.
        p99_s: the least number of seconds that 99 % of the calls did not exceed.
        max_s: seconds of the slowest call.
        algorithm_bytes_per_s: size over median; 0 where there is no size.
        bus_bytes_per_s: bytes in or out of the busiest rank, over the median.
    """

    num_bytes: int
    num_samples: int
    min_s: float
    median_s: float
    p99_s: float
    max_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


def summarised(
    operation: Operation, num_ranks: int, num_bytes: int, seconds: Sequence[float]
) -> Point:
    """The statistics of some calls.

    Args:
        operation: what was called.
        num_ranks: number of ranks that took part.
        num_bytes: its size.
        seconds: time of each call, at least one.
    """
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    tail = ordered[math.ceil(_TAIL * len(ordered)) - 1]
    speed = num_bytes / median
    bus = speed * operation.factor(num_ranks)
    return Point(num_bytes, len(ordered), ordered[0], median, tail, ordered[-1], speed, bus)


_LEAST_POINTS = 3
"""Least points of a piece: a line through fewer says nothing about the times between them."""
_MOST_PIECES = 3
_GOOD = 0.1
"""Where no time is further off than this part of it, another piece is not tried."""
_GAIN = 0.6
"""Another piece must bring the worst residual down to this part of what it was."""


@dataclass(frozen=True)
class Piece:
    """A line that holds for a range of sizes.

    Attributes:
        first_bytes: least size that it was fitted to.
        last_bytes: greatest size that it was fitted to.
        alpha_s: seconds that a call takes whatever its size.
        beta_s_per_byte: seconds that each byte takes.
    """

    first_bytes: int
    last_bytes: int
    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """The time that the line gives for a size."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes


@dataclass(frozen=True)
class Fit:
    """One or several lines.

    Attributes:
        pieces: lines, by ascending size.
        worst_residual: greatest relative difference to a measured time.
    """

    pieces: tuple[Piece, ...]
    worst_residual: float

    def seconds(self, num_bytes: float) -> float:
        """The time for a size, also between the measured ones and beyond them."""
        # Between two pieces, the one before holds: protocols switch at sizes above a limit.
        after = (p for p in reversed(self.pieces) if p.first_bytes <= num_bytes)
        return next(after, self.pieces[0]).seconds(num_bytes)


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """The line through some times, or several lines where one is far off.

    Args:
        sizes: bytes, ascending, at least one.
        seconds: time of each, greater than 0.
    """
    best = _fit([_line(sizes, seconds)], sizes, seconds)
    for num_pieces in range(2, _MOST_PIECES + 1):
        if best.worst_residual <= _GOOD:
            break
        tried = [
            _fit([_line(sizes[a:b], seconds[a:b]) for a, b in cuts], sizes, seconds)
            for cuts in _partitions(len(sizes), num_pieces)
        ]
        if tried:
            other = min(tried, key=lambda fit: fit.worst_residual)
            best = other if other.worst_residual <= _GAIN * best.worst_residual else best
    return best


def _fit(pieces: Sequence[Piece], sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    bare = Fit(tuple(pieces), 0.0)
    residuals = (abs(bare.seconds(n) / s - 1) for n, s in zip(sizes, seconds, strict=True))
    return Fit(bare.pieces, max(residuals))


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> Piece:
    """The line with the least sum of squared relative errors, without a negative coefficient."""
    # In units of the last size and of its time, no sum below is far from 1.
    size, time = max(sizes[-1], 1), seconds[-1]
    rows = [(time / s, n / size * time / s) for n, s in zip(sizes, seconds, strict=True)]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    alpha = beta = -1.0
    if len(sizes) > 1 and determinant > 1e-12 * aa * bb:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0 or beta < 0:
        # The best is then on an edge; the sum of squares is what is left of the number of rows.
        only_beta = b * b / bb if bb else 0.0
        alpha, beta = (0.0, b / bb) if only_beta > a * a / aa else (a / aa, 0.0)
    return Piece(sizes[0], sizes[-1], alpha * time, beta * time / size)


def _partitions(count: int, num_pieces: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut `count` points in a row into pieces: (first, behind the last) of each."""
    if num_pieces == 1:
        if count >= _LEAST_POINTS:
            yield [(0, count)]
        return
    for cut in range(_LEAST_POINTS * (num_pieces - 1), count - _LEAST_POINTS + 1):
        for before in _partitions(cut, num_pieces - 1):
            yield [*before, (cut, count)]
