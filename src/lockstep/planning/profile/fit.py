"""Straight lines through measured times: seconds = alpha + beta * bytes.

The model is Hockney's (R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20,
1994). Times of one profile differ by five orders of magnitude, so relative errors are made small:
sum over sizes of ((alpha + beta * bytes) / seconds - 1)^2, with alpha and beta of at least 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LEAST_POINTS = 3
"""Of a piece: a line through fewer says nothing of what lies between them."""
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
