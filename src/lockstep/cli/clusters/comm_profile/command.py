"""`lockstep comm-profile`: starts ranks that measure, then shows and writes their profile."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.cli.clusters.comm_profile.rank import Request, command, measured
from lockstep.cli.clusters.comm_profile.tables import (
    check_plot,
    heading,
    skipped_lines,
    tables,
    write_plot,
)
from lockstep.cli.options import check_writable, shown_status
from lockstep.errors import ConfigError, LaunchError, LockstepError, RankFailure
from lockstep.launching.job.commands import RankCommand, rank_environment
from lockstep.launching.job.run import Captured, capture
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.process import tell
from lockstep.launching.start import choose_launcher, launcher_command
from lockstep.planning.operations import parse_sizes
from lockstep.planning.profile import Profile, from_json, write_json

NUM_RANKS = 2
DEVICES = ("auto", "cpu", "cuda")

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
        device: `cpu`, `cuda` or `auto`.
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
    what = f"measuring for about {options.seconds:g} s ({num_ranks} ranks, {ranks.launcher})"
    with shown_status(console, what, quiet=False):
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
    given = [("-n", options.num_ranks), ("--launcher", options.launcher)]
    for name, value in given:
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
        write_plot(options.plot, profile)
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
