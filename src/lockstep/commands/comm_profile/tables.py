"""A communication profile for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from lockstep.observe.text import brief
from lockstep.planning.profile.operations import OPERATIONS
from lockstep.planning.profile.profile import Measurement, Profile, Scope
from lockstep.planning.profile.sizes import size_text

_MEANT = {
    "inside": "inside a host",
    "between": "between hosts, one rank of each",
    "all": "all ranks of all hosts",
}


def heading(profile: Profile) -> str:
    """A line that says among whom a profile was measured."""
    hosts = ", ".join(f"{h.name} ({len(h.ranks)} ranks, {h.cores} cores)" for h in profile.hosts)
    carried = f"{profile.launcher}, {profile.transport}, {profile.device}"
    return f"{profile.num_ranks} ranks ({carried}) on {hosts}"


def tables(profile: Profile) -> Iterator[Table]:
    """For each scope, a table of sizes and one of fits."""
    scopes: list[Scope] = ["inside", "between", "all"]
    for scope in scopes:
        if of := [m for m in profile.measurements if m.scope == scope]:
            yield _times(f"{_MEANT[scope]}, {of[0].num_ranks} ranks", of)
            yield _fits(of)


def skipped_lines(profile: Profile) -> Iterator[str]:
    """Which sizes were not measured, and why."""
    for measurement in profile.measurements:
        for reason in ("time", "memory"):
            sizes = [s.num_bytes for s in measurement.skipped if s.reason == reason]
            if sizes:
                key = f"{measurement.layer}/{measurement.operation}"
                remedy = "raise --seconds" if reason == "time" else "the memory is too small"
                yield (
                    f"{key}, {_MEANT[measurement.scope]}: skipped from {size_text(sizes[0])} on "
                    f"({remedy})"
                )


def speed_text(bytes_per_s: float) -> str:
    """A bandwidth in GB/s or MB/s of powers of 1,000, with three digits."""
    if bytes_per_s >= 999.5e6:  # rounded to three digits it would be 1,000
        return f"{bytes_per_s / 1e9:.3g} GB/s"
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def _times(title: str, measurements: list[Measurement]) -> Table:
    table = _table(title, "size", "calls", "least", "median", "99 %", "algorithm", "bus")
    for measurement in measurements:
        table.add_row(f"{measurement.layer}/{measurement.operation}")
        for point in measurement.points:
            has_size = point.num_bytes > 0
            table.add_row(
                f"  {size_text(point.num_bytes)}" if has_size else "",
                str(point.num_samples),
                brief(point.min_s),
                brief(point.median_s),
                brief(point.p99_s),
                speed_text(point.algorithm_bytes_per_s) if has_size else "",
                speed_text(point.bus_bytes_per_s) if has_size else "",
            )
    return table


def _fits(measurements: list[Measurement]) -> Table:
    table = _table("seconds = α + β·bytes", "sizes", "α", "1/β", "bus", "worst")
    for measurement in measurements:
        if measurement.fit is None:
            continue
        key = f"{measurement.layer}/{measurement.operation}"
        table.add_row(key)
        factor = OPERATIONS[key].factor(measurement.num_ranks)
        worst = f"{100 * measurement.fit.worst_residual:.0f} %"
        for piece in measurement.fit.pieces:
            speed = 1 / piece.beta_s_per_byte if piece.beta_s_per_byte else 0.0
            table.add_row(
                f"  {size_text(piece.first_bytes)}–{size_text(piece.last_bytes)}",
                brief(piece.alpha_s),
                speed_text(speed) if speed else "∞",
                speed_text(speed * factor) if speed else "∞",
                worst,
            )
            worst = ""
    return table


def _table(title: str, first: str, *others: str) -> Table:
    """A table whose first column has names, and below each name its sizes.

    So it fits into 80 columns, at which a number would be parted from its unit.
    """
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column(f"operation, {first}", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
