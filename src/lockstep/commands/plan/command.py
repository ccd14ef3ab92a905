"""`lockstep plan`: measure, predict, recommend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.commands.outputs import check_writable
from lockstep.commands.plan.measuring import Measuring, measure
from lockstep.commands.plan.tables import lines, table
from lockstep.commands.waiting import shown_status
from lockstep.errors import ConfigError
from lockstep.launchers.host.cores import usable_cores
from lockstep.launching.start import choose_launcher
from lockstep.launching.warm import fork_server
from lockstep.parsing import parse_int
from lockstep.planning.network import Network, parse_link
from lockstep.planning.plan import Plan, make_plan, write_plan
from lockstep.planning.profile.profile import read_profile
from lockstep.targets import absolute, configured, is_script

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
    numbers = _numbers(options.ranks)
    launcher = choose_launcher(options.launcher, max(2, *numbers))
    with fork_server(launcher, target) as server:
        measuring = _measuring(target, overrides, options, numbers, launcher, server)
        link = parse_link(options.network) if options.network is not None else None
        given = [read_profile(path) for path in options.profiles]
        check_writable(options.json)
        with shown_status(console, f"planning {target}", options.quiet) as status:

            def say(what: str) -> None:
                if status is not None:
                    status.update(f"measuring {target}: {what}")

            facts = measure(measuring, say)
    made = make_plan(
        facts,
        Network(given or facts.messages, measuring.ranks_per_host, link),
        measuring.numbers,
        measuring.ranks_per_host,
        options.hours_between,
    )
    if options.json is not None:
        write_plan(options.json, made)
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
    """What is to be measured.

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
    if config.device == "cuda":
        raise ConfigError("device=cuda: a plan is of ranks on CPUs so far; set device=cpu")
    if config.compression.name != "none":
        raise ConfigError(
            f"compression.name={config.compression.name}: a plan is of gradients that travel as "
            "they are; set compression.name=none"
        )
    cores = usable_cores()
    return Measuring(
        target=absolute(target),
        kind=kind,
        config=config,
        overrides=(*overrides, "device=cpu"),
        numbers=numbers,
        ranks_per_host=options.ranks_per_host or max(1, cores // config.threads),
        cores=cores,
        launcher=launcher,
        seconds=options.seconds,
        rounds=options.rounds,
        server=server,
    )


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    with suppress(ValueError):
        found = [parse_int(part.strip(), least=1, most=_MOST_RANKS) for part in text.split(",")]
    if not 1 <= len(found) <= _MOST_NUMBERS:
        raise ConfigError(
            f"--ranks {text}: must be numbers of ranks from 1 to {_MOST_RANKS:,} with commas "
            f"between them, at most {_MOST_NUMBERS}"
        )
    return tuple(sorted(set(found)))
