"""Starting ranks for a target and watching them to their end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config import TrainConfig
from lockstep.engine.recovery import SURVIVABLE
from lockstep.errors import LaunchError
from lockstep.launching.api import Session
from lockstep.launching.host.output_pump import pumped_output
from lockstep.launching.host.processes import usable_cores
from lockstep.launching.job.commands import (
    SILENCE_S,
    RankCommand,
    is_one_host,
    local_command,
    mpirun_command,
    python_command,
    rank_environment,
    threads_of,
    torchrun_command,
)
from lockstep.launching.job.ending import Ended, how_ended
from lockstep.launching.job.ray_cluster import Request
from lockstep.launching.job.ray_node import check_ray
from lockstep.launching.job.run import run_ranks
from lockstep.launching.rank.process import STOP_FILE, stop_signals
from lockstep.launching.targets import is_script, script_path
from lockstep.launching.warm.proxy import through_proxy
from lockstep.observe import Sinks, event_from_row, view
from lockstep.observe.text import count

LAUNCHERS = ("python", "local", "mpi", "torchrun")
"""Of ranks on this host."""
TRAIN_LAUNCHERS = (*LAUNCHERS, "ray")
"""Of ranks that train a target."""

_MOST_DELAY_S = 60.0


def choose_launcher(launcher: str | None, num_ranks: int, known: Sequence[str] = LAUNCHERS) -> str:
    """The launcher for this many ranks: the given one, or MPI on CPUs and torchrun on GPUs.

    Raises:
        LaunchError: there is no such launcher, or it cannot start so many ranks.
    """
    if num_ranks < 1:
        raise LaunchError(f"-n {num_ranks}: must be at least 1")
    if launcher is None:
        if num_ranks == 1:
            return "python"
        return "torchrun" if torch.cuda.device_count() >= num_ranks else "mpi"
    if launcher not in known:
        raise LaunchError(f"--launcher {launcher}: must be one of {', '.join(known)}")
    if launcher == "python" and num_ranks > 1:
        raise LaunchError(f"--launcher python: starts one rank, not {num_ranks}; use mpi")
    return launcher


REPLACING = (*SURVIVABLE, "ray")
"""Launchers that can replace killed ranks."""


def check_replacements(launcher: str, replacements: int) -> None:
    """Refuse to replace killed ranks under a launcher that cannot.

    Raises:
        LaunchError: `replacements` is not 0, and this launcher cannot replace ranks.
    """
    if replacements and launcher not in REPLACING:
        raise LaunchError(
            f"--replace {replacements}: the launcher {launcher} cannot replace ranks; use "
            "-n N --launcher mpi, local or ray"
        )


def address_of(address: str | None) -> str:
    """The address of the Ray cluster that is meant."""
    return address or os.environ.get("RAY_ADDRESS") or "auto"


def check_ray_address(launcher: str, address: str | None) -> None:
    """Refuse the address of a Ray cluster under another launcher, or where none answers.

    Raises:
        LaunchError: there is one; or Ray is not there, or no cluster answers.
    """
    if launcher == "ray":
        check_ray(address_of(address))
    elif address is not None:
        raise LaunchError(f"--ray-address {address}: belongs to --launcher ray; add that")


@dataclass(frozen=True)
class RayCluster:
    """Where ranks are started on Ray.

    Attributes:
        address: of the cluster, `HOST:PORT` or `auto`; None for that of `RAY_ADDRESS`, or `auto`.
        threads: number of threads of each rank, which has so many of Ray's CPUs.
    """

    address: str | None = None
    threads: int = 1

    @classmethod
    def of(cls, address: str | None, config: TrainConfig) -> RayCluster:
        """What the ranks of a config need."""
        return cls(address, config.threads)

    @classmethod
    def of_script(cls, address: str | None, overrides: Sequence[str]) -> RayCluster:
        """The same for a script, by what `key=value` items say of its config."""
        return cls(address, threads_of(overrides))


def ray_command(
    num_ranks: int,
    argv: Sequence[str],
    cluster: RayCluster,
    replacements: int = 0,
    fds: tuple[int, ...] = (),
) -> RankCommand:
    """Run `argv` on several ranks of a Ray cluster.

    Args:
        num_ranks: number of ranks to start.
        argv: this interpreter, and its arguments in each rank.
        cluster: where to start them.
        replacements: greatest number of processes to start in the place of killed ones.
        fds: file descriptor of a copy of a task, if there is one.
    """
    request = Request(
        address_of(cluster.address), num_ranks, replacements, cluster.threads, tuple(argv[1:]),
        STOP_FILE, stop_signals(), *fds,
    )  # fmt: skip
    return RankCommand(tuple(request.argv), num_ranks, "ray", forwards_signals=True, fds=fds)


def rank_command(
    launcher: str,
    num_ranks: int,
    target: str,
    arguments: Sequence[str],
    replacements: int = 0,
    server: str = "",
    silence_s: float = SILENCE_S,
    cluster: RayCluster | None = None,
) -> RankCommand:
    """The command that starts ranks which train a target; a script gets no arguments.

    Args:
        launcher: name of the launcher.
        num_ranks: number of ranks to start.
        target: recipe, file or script to train.
        arguments: arguments of the ranks after the target.
        replacements: greatest number of processes to start in the place of killed ranks.
        server: name of the warm server that forks the ranks; empty if there is none.
        silence_s: seconds after which a host that does not answer is lost; 0 for mpirun's own.
        cluster: where the launcher `ray` starts them.
    """
    if is_script(target):
        argv = [sys.executable, str(script_path(target))]
    else:
        argv = [sys.executable, "-m", "lockstep", "train", target, *arguments]
    if launcher == "ray":
        return ray_command(num_ranks, argv, cluster or RayCluster(), replacements)
    return launcher_command(launcher, num_ranks, argv, replacements, server, silence_s)


def launcher_command(
    launcher: str,
    num_ranks: int,
    argv: Sequence[str],
    replacements: int = 0,
    server: str = "",
    silence_s: float = SILENCE_S,
) -> RankCommand:
    """The command that starts ranks of this machine which run `argv`; see `rank_command`."""
    argv = through_proxy(argv, server)
    if launcher == "mpi":
        return mpirun_command(
            num_ranks, argv, cores=usable_cores(), replacements=replacements,
            one_host=is_one_host(os.environ), silence_s=silence_s,
        )  # fmt: skip
    if launcher == "local":
        return local_command(num_ranks, argv, replacements, server=server)
    if launcher == "torchrun":
        return torchrun_command(num_ranks, argv)
    return python_command(argv)


def start(
    command: RankCommand,
    session: Session,
    threads: int,
    *,
    on_row: Callable[[dict[str, Any]], None],
    on_line: Callable[[str], None] = print,
    restarts: int = 3,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run ranks to their end; start them again from the newest checkpoint if they all die.

    Args:
        command: command that starts the ranks.
        session: request that the ranks get by their environment.
        threads: number of threads of each rank.
        on_row: called with the row of each new event.
        on_line: called with each line of the ranks' standard output.
        restarts: greatest number of restarts without a committed step in between.
        env: further environment variables for the ranks.
    """
    assert session.run_dir is not None
    step = failures = 0

    def watch(row: dict[str, Any]) -> None:
        nonlocal step, failures
        if row["event"] == "StepDone" and row["step"] > step:
            step, failures = row["step"], 0
        on_row(row)

    while True:
        since = time.time()
        everything = rank_environment(threads) | session.to_env() | dict(env or {})
        try:
            with pumped_output():  # a reader that stalls must not stall the watching of ranks
                outcome = run_ranks(
                    command, everything, run_dir=Path(session.run_dir), on_row=watch,
                    on_line=on_line, on_notice=_notice,
                )  # fmt: skip
            ended = how_ended(outcome, session, since, command.launcher)
            ended = replace(ended, stopped_by=outcome.stopped_by)
        except LaunchError as error:
            ended = Ended(error.exit_code, str(error), str(error).partition("\n")[0])
        if not ended.again or failures >= restarts:
            return ended
        failures += 1
        delay_s = min(2.0 ** (failures - 1), _MOST_DELAY_S)
        _notice(
            f"{ended.again}; starting again from the newest checkpoint in {delay_s:g} s "
            f"({failures} of {restarts} without progress)"
        )
        time.sleep(delay_s)
        session = replace(session, resume=True)


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start_shown(
    command: RankCommand, session: Session, threads: int, on_started: Callable[[], None]
) -> Ended:
    """Run ranks to their end, shown on the console or in the notebook as `session` says.

    Args:
        command: command that starts the ranks.
        session: request that the ranks get by their environment.
        threads: number of threads of each rank.
        on_started: function that is called when the ranks have started the run.
    """
    with pumped_output():  # before there is a view, which may put a stream of its own there
        shown = view(session.quiet, per_rank=session.per_rank, verbose=session.verbose)
        with Sinks([shown]) as sinks:
            shown.wait(f"starting {count(command.num_ranks, 'rank')} ({command.launcher})")

            def show(row: dict[str, Any]) -> None:
                if row["event"] == "RunStarted":
                    on_started()
                sinks(event_from_row(row))

            return start(command, session, threads, on_row=show)
