"""`lockstep comm-profile`: starts ranks that measure, then shows their profile and writes it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.cli.clusters.comm_profile_rank import Request, command, measured
from lockstep.cli.options import check_writable, shown_status
from lockstep.errors import ConfigError, LaunchError, LockstepError, RankFailure
from lockstep.launching.job.commands import RankCommand, rank_environment
from lockstep.launching.job.run import Captured, capture
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.process import tell
from lockstep.launching.start import choose_launcher, launcher_command
from lockstep.observe.figures import check_picture, new_figure, save
from lockstep.observe.text import brief
from lockstep.planning.operations import OPERATIONS, parse_sizes, size_text
from lockstep.planning.profile import Measurement, Profile, Scope, from_json, write_json

NUM_RANKS = 2
DEVICES = ("auto", "cpu", "cuda", "accelerator")

_START_S = 120.0
"""Seconds that ranks may take beside the measurement."""
_LATE = 2.0
"""Factor by which a measurement may exceed the requested time: the largest sizes are few calls."""
_MOST_SECONDS = 86_400.0


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        num_ranks: number of ranks to start; None for two, or where this process is a rank.
        launcher: what starts them; None to choose.
        sizes: sizes, as `parse_sizes` takes them.
        seconds: time to measure for, about.
        device: one of `DEVICES`.
        json: file for the profile.
        plot: file for the picture.
        with_torch: whether to measure `torch.distributed` too.
    """

    num_ranks: int | None
    launcher: str | None
    sizes: str
    seconds: float
    device: str
    json: Path | None
    plot: Path | None
    with_torch: bool = True


def comm_profile(options: Options, console: Console) -> int:
    """Measure, show and write a profile; in ranks of an outer launcher, as one of them.

    Args:
        options: what to do.
        console: console for tables; of ranks, that of rank 0 is used.

    Returns:
        The exit code.

    Raises:
        LockstepError: an option cannot be used, ranks could not be started, or one was lost.
    """
    environment = detect(os.environ)
    if environment.world_size == 1:
        _start(options, console)
        return 0
    try:
        _refuse_choice(options, environment.launcher)
        profile = measured(_request(options), environment, lambda: _check_files(options))
        if environment.rank == 0:
            _show(profile, options, console)
    except LockstepError as error:  # one of the ranks prints it
        tell(error)
        return error.exit_code
    return 0


def _start(options: Options, console: Console) -> None:
    """Start ranks that measure, and show their profile."""
    request = _request(options)
    num_ranks = NUM_RANKS if options.num_ranks is None else options.num_ranks
    if num_ranks < 2:
        raise LaunchError(f"-n {num_ranks}: must be at least 2, for ranks talk to each other")
    launcher = choose_launcher(options.launcher, num_ranks)
    ranks = launcher_command(launcher, num_ranks, command(request))
    _check_files(options)
    status = f"measuring for about {options.seconds:g} s ({num_ranks} ranks, {ranks.launcher})"
    with shown_status(console, status, quiet=False):
        profile = profile_of(ranks, options.seconds)
    _show(profile, options, console)


def profile_of(ranks: RankCommand, seconds: float) -> Profile:
    """The profile that some ranks measure.

    Args:
        ranks: command that starts them.
        seconds: seconds for which they are to measure.

    Raises:
        LockstepError: they ended without one.
    """
    timeout_s = _START_S + _LATE * seconds
    output = capture(ranks, rank_environment(threads=1), timeout_s)
    for line in output.stdout.splitlines():
        with suppress(ValueError):
            return from_json(line)
    raise _error(output, timeout_s)


def _error(output: Captured, timeout_s: float) -> LockstepError:
    """The error for ranks that have ended without a profile."""
    lines = [line.strip() for line in output.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if output.exit_code == LaunchError.exit_code and errors:
        return LaunchError(errors[0])
    if errors:
        reason = errors[0]
    elif output.exit_code is None:
        reason = f"the ranks were not done after {timeout_s:.0f} s"
    else:
        last = lines[-1] if lines else "they said nothing"
        reason = f"the ranks ended without a profile (exit code {output.exit_code}): {last}"
    return RankFailure(
        f"comm-profile: {reason}; nothing was written; start it again, or try `lockstep doctor`"
    )


def _request(options: Options) -> Request:
    """The request for the ranks.

    Raises:
        ConfigError: an option cannot be used.
    """
    if not 0 < options.seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"--seconds {options.seconds:g}: must be more than 0, and {_MOST_SECONDS:,.0f} at most"
        )
    if options.device not in DEVICES:
        raise ConfigError(f"--device {options.device}: must be one of {', '.join(DEVICES)}")
    sizes = parse_sizes(options.sizes)
    return Request(sizes, options.seconds, options.device, options.with_torch)


def _refuse_choice(options: Options, launcher: str) -> None:
    """Refuse options that say how to start ranks where they have been started."""
    options_given = [("-n", options.num_ranks), ("--launcher", options.launcher)]
    for name, value in options_given:
        if value is not None:
            raise LaunchError(
                f"{name} {value}: this process is already a rank (started by {launcher}); leave "
                f"{name} out"
            )


def _check_files(options: Options) -> None:
    """Make sure, before minutes are spent, that what was measured can be written.

    Raises:
        LockstepError: a file cannot be written, or no picture drawn.
    """
    if options.plot is not None:
        check_plot(options.plot)
    check_writable(options.json)
    check_writable(options.plot)


def _show(profile: Profile, options: Options, console: Console) -> None:
    """Write files first: what was measured must not be lost to a closed terminal."""
    if options.json is not None:
        write_json(options.json, profile)
    if options.plot is not None:
        save(figure(profile), options.plot)
    console.print(heading(profile), highlight=False, markup=False)
    for table in tables(profile):
        console.print()
        console.print(table)
    console.print()
    for line in skipped_lines(profile):
        console.print(line, highlight=False, markup=False)
    for warning in profile.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)
    for name, path in (("profile", options.json), ("plot", options.plot)):
        if path is not None:
            console.print(f"{name:8} {path}", highlight=False, markup=False)


_EXTRA = "report"
_LINES = {"lockstep": "-", "torch": "--"}
_SCOPES = {"inside": "inside a host", "between": "between hosts", "all": "all ranks"}


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn, and that a file's name says of which kind.

    Raises:
        ConfigError: its name ends in something else, or matplotlib is not installed.
    """
    check_picture(path)
    new_figure(1.0, 1.0, "", _EXTRA)


def figure(profile: Profile) -> Any:
    """For each scope, times with their fits on the left, and bus bandwidths on the right."""
    scopes = list(dict.fromkeys(m.scope for m in profile.measurements))
    title = f"{profile.num_ranks} ranks over {profile.transport} ({profile.launcher})"
    drawn = new_figure(12.0, 1.0 + 4.6 * len(scopes), title, _EXTRA)
    for row, scope in enumerate(scopes):
        of = [m for m in profile.measurements if m.scope == scope and m.points[0].num_bytes]
        latency = drawn.add_subplot(len(scopes), 2, 2 * row + 1)
        speed = drawn.add_subplot(len(scopes), 2, 2 * row + 2)
        numbers = {"lockstep": itertools.count(), "torch": itertools.count()}
        for measurement in of:
            colour = f"C{next(numbers[measurement.layer]) % 10}"
            _draw(measurement, colour, latency, speed)
        _label(latency, f"{_SCOPES[scope]}: median time, and fits (thin)", "µs")
        _label(speed, f"{_SCOPES[scope]}: bus bandwidth", "GB/s")
        if of:
            speed.legend(fontsize=7, ncols=2)
    return drawn


def _draw(measurement: Measurement, colour: str, latency: Any, speed: Any) -> None:
    sizes = [point.num_bytes for point in measurement.points]
    style = {"color": colour, "linestyle": _LINES[measurement.layer], "marker": "."}
    label = f"{measurement.layer}/{measurement.operation}"
    latency.plot(sizes, [1e6 * p.median_s for p in measurement.points], label=label, **style)
    speed.plot(sizes, [1e-9 * p.bus_bytes_per_s for p in measurement.points], label=label, **style)
    for piece in measurement.fit.pieces if measurement.fit else ():
        held = [n for n in sizes if piece.first_bytes <= n <= piece.last_bytes]
        fitted = [1e6 * piece.seconds(n) for n in held]
        latency.plot(held, fitted, color=colour, linewidth=0.5)


def _label(axes: Any, title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("bytes", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.3)


_MEANT = {
    "inside": "inside a host",
    "between": "between hosts, one rank of each",
    "all": "all ranks of all hosts",
}


def heading(profile: Profile) -> str:
    """A line that describes the ranks of a profile."""
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

    So it fits into 80 columns; otherwise numbers would be split from their units.
    """
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column(f"operation, {first}", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
