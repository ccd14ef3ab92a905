"""`lockstep plan`: measures a task, predicts its layouts, and recommends one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.cli.clusters.plan_measuring import Measuring, device_of, measure
from lockstep.cli.options import check_writable, shown_status
from lockstep.config.parsing import option_numbers
from lockstep.errors import ConfigError
from lockstep.launching.api.device import num_devices, why_no_gpu
from lockstep.launching.host.processes import usable_cores
from lockstep.launching.start import choose_launcher
from lockstep.launching.targets import absolute, configured, is_script
from lockstep.launching.warm.starting import fork_server
from lockstep.observe.text import brief, count, duration, size
from lockstep.planning.measurements import Network, parse_link
from lockstep.planning.plan import Plan, Row, make_plan
from lockstep.planning.profile import read_profile, write_json

_COLUMNS = ("ranks", "mesh", "step", "c/s/w %", "samples/s", "ideal", "memory", "sends")
_WORTH = 0.98
"""A sharded layout is shown if its memory is at most this part of the unsharded one's."""


def table(plan: Plan) -> Table:
    """A row for each layout; the recommended one is marked."""
    shown = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name == "mesh" else "right", no_wrap=True)
    for number, row in enumerate(plan.rows):
        if number != plan.best and not _is_shown(plan, row):
            continue
        style = "green" if number == plan.best else None if row.prediction.fits else "red"
        shown.add_row(*_cells(row), style=style)
    return shown


def lines(plan: Plan) -> Iterator[str]:
    """The recommendation with its reasons, the cost of checkpoints and losses, and assumptions."""
    yield "c/s/w: parts of a step that are computing, sums of gradients, waiting for the slowest"
    best, facts = plan.recommended, plan.facts
    way = best.prediction
    hosts = f" on {count(way.num_hosts, 'host')}" if way.num_hosts > 1 else ""
    keys = " ".join(way.layout.overrides)
    yield f"recommended: {count(way.layout.num_ranks, 'rank')}{hosts}, mesh {way.layout.name}" + (
        f" ({keys})" if keys else ""
    )
    yield from (f"  {reason}" for reason in plan.reasons)
    if facts.total_steps:
        steps = count(facts.total_steps, "step")
        took = duration(facts.total_steps * way.step_s)
        yield f"  {steps} take {took}, after a start of {facts.start_s:.1f} s"
    yield (
        f"checkpoints: {size(facts.checkpoint_bytes)} in {brief(facts.write_s)}, of which "
        f"training stands still for {brief(facts.checkpoint_s)}; {_interval(plan)}"
    )
    yield f"lost ranks: {_losses(plan)}"
    yield "assumed:"
    yield from (f"  {line}" for line in plan.assumptions)


def _is_shown(plan: Plan, row: Row) -> bool:
    """Whether a layout differs enough from the unsharded one."""
    way = row.prediction
    whole = plan.find(replace(way.layout, sharding="none"))
    if way.layout.sharding == "none" or whole is None:
        return True
    return way.peak_bytes <= _WORTH * whole.prediction.peak_bytes


def _interval(plan: Plan) -> str:
    """The best interval of checkpoints, which may be longer than the run."""
    lost, total_steps = plan.recommended.losses, plan.facts.total_steps
    steps = count(lost.interval_steps, "step")
    if 0 < total_steps <= lost.interval_steps:
        return (
            f"best at the end only: the best interval, {steps}, is not shorter than the run "
            f"({count(total_steps, 'step')})"
        )
    return f"best every {steps} ({duration(lost.interval_s)}), which costs {lost.checkpoints:.2%}"


def _losses(plan: Plan) -> str:
    lost, way = plan.recommended.losses, plan.recommended.prediction
    between_s = plan.hours_between * 3600 / way.layout.num_ranks
    every = f"one in {duration(between_s)} (each rank one in {plan.hours_between:g} hours)"
    again = f"to start again costs {lost.restarted:.2%} of the time"
    if lost.in_place is None:
        return f"{every}; {again}; the others cannot go on without it"
    return f"{every}; going on without it costs {lost.in_place:.3%} of the time, {again}"


def _cells(row: Row) -> list[str]:
    way = row.prediction
    parts = (way.compute_s, way.exchange_s, way.waiting_s)
    return [
        str(way.layout.num_ranks),
        way.layout.name,
        brief(way.step_s),
        f"{'/'.join(f'{100 * part / way.step_s:.0f}' for part in parts)}",
        f"{way.samples_per_s:,.0f}",
        f"{way.efficiency:.0%}",
        size(way.peak_bytes),
        size(way.sent_bytes),
    ]


_MOST_RANKS = 1_000_000
_MOST_NUMBERS = 64
_MOST_SECONDS = 600.0
_MOST_ROUNDS = 100


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        ranks: numbers of ranks, with commas between them.
        ranks_per_host: most ranks of a host; None for as many as have cores.
        profiles: files of communication profiles; empty for those of this host.
        network: link between hosts, as `parse_link` takes it.
        hours_between: mean hours between two losses of one rank.
        launcher: what starts several ranks; None to choose.
        seconds: time that steps of a training are measured for, about.
        rounds: how often each training is done, in turn; the fastest counts.
        json: file for the plan.
        quiet: whether to show no spinner.
    """

    ranks: str
    ranks_per_host: int | None
    profiles: tuple[Path, ...]
    network: str | None
    hours_between: float
    launcher: str | None
    seconds: float
    rounds: int
    json: Path | None
    quiet: bool = False


def plan(target: str, overrides: Sequence[str], options: Options, console: Console) -> Plan:
    """Measure a task, predict its layouts, show them, and write them to a file.

    Raises:
        LockstepError: an option cannot be used, or the task cannot be trained.
    """
    numbers = tuple(option_numbers("--ranks", options.ranks, _MOST_RANKS))
    if len(numbers) > _MOST_NUMBERS:
        raise ConfigError(f"--ranks {options.ranks}: must be {_MOST_NUMBERS} numbers at most")
    launcher = choose_launcher(options.launcher, max(2, *numbers))
    with fork_server(launcher, target) as server:
        measuring = _measuring(target, overrides, options, numbers, launcher, server)
        link = parse_link(options.network) if options.network is not None else None
        profiles = [read_profile(path) for path in options.profiles]
        check_writable(options.json)
        with shown_status(console, f"planning {target}", options.quiet) as status:

            def say(text: str) -> None:
                if status is not None:
                    status.update(f"measuring {target}: {text}")

            facts = measure(measuring, say)
    made = make_plan(
        facts,
        Network(profiles or facts.messages, measuring.ranks_per_host, link),
        measuring.numbers,
        measuring.ranks_per_host,
        options.hours_between,
    )
    if options.json is not None:
        write_json(options.json, made)
    console.print(table(made))
    for line in lines(made):
        console.print(line, highlight=False, markup=False)
    return made


def _measuring(
    target: str,
    overrides: Sequence[str],
    options: Options,
    numbers: tuple[int, ...],
    launcher: str,
    server: str,
) -> Measuring:
    """The measurements to make.

    Raises:
        ConfigError: an option cannot be used.
    """
    if not 0 < options.seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"--seconds {options.seconds:g}: must be more than 0, and {_MOST_SECONDS:g} at most"
        )
    if not 1 <= options.rounds <= _MOST_ROUNDS:
        raise ConfigError(f"--rounds {options.rounds}: must be between 1 and {_MOST_ROUNDS}")
    if not 0 < options.hours_between < float("inf"):
        raise ConfigError(f"--mtbf {options.hours_between:g}: must be hours, more than 0")
    if options.ranks_per_host is not None and options.ranks_per_host < 1:
        raise ConfigError(f"--ranks-per-host {options.ranks_per_host}: must be at least 1")
    if is_script(target):
        raise ConfigError(f"{target}: is a script; name its task, as in {target}:MyTask")
    kind, config = configured(target, overrides)
    device = device_of(config)
    if config.compression.name != "none":
        raise ConfigError(
            f"compression.name={config.compression.name}: a plan is of gradients that travel as "
            "they are; set compression.name=none"
        )
    if device == "cpu":
        cores = usable_cores()
    else:
        found, cores = num_devices(device)
        if not cores:
            raise ConfigError(f"device={device!r}: torch {why_no_gpu(found)}; or plan device=cpu")
        if cores < 2 and max(numbers) > 1:
            raise ConfigError(
                f"--ranks {options.ranks}: what ranks exchange is measured between two GPUs, and "
                "this host has one; plan --ranks 1, or device=cpu"
            )
    return Measuring(
        target=absolute(target),
        kind=kind,
        config=config,
        overrides=(*overrides, f"device={device}"),
        numbers=numbers,
        ranks_per_host=options.ranks_per_host
        or (max(1, cores // config.threads) if device == "cpu" else cores),
        cores=cores,
        launcher=launcher,
        seconds=options.seconds,
        rounds=options.rounds,
        server=server,
    )
