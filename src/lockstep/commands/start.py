"""Starting ranks for a target and watching them to their end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.commands.target import is_script, script_path
from lockstep.errors import LaunchError
from lockstep.front import Sitting
from lockstep.launch.cores import usable_cores
from lockstep.launch.ranks import (
    RankCommand,
    mpirun_command,
    python_command,
    rank_environment,
    torchrun_command,
)
from lockstep.launch.supervise import Outcome, run_ranks
from lockstep.observe import ConsoleView, Sinks, event_from_row

LAUNCHERS = ("python", "mpi", "torchrun")


@dataclass(frozen=True)
class Ended:
    """How started ranks ended.

    Attributes:
        exit_code: what the command is to exit with.
        message: what the user should read, empty if all went well.
    """

    exit_code: int
    message: str = ""


def choose_launcher(launcher: str | None, num_ranks: int) -> str:
    """The launcher for this many ranks: the wish, or MPI on CPUs and torchrun on GPUs.

    Raises:
        LaunchError: there is no such launcher, or it cannot start so many ranks.
    """
    if num_ranks < 1:
        raise LaunchError(f"-n {num_ranks}: must be at least 1")
    if launcher is None:
        if num_ranks == 1:
            return "python"
        return "torchrun" if torch.cuda.device_count() >= num_ranks else "mpi"
    if launcher not in LAUNCHERS:
        raise LaunchError(f"--launcher {launcher}: must be one of {', '.join(LAUNCHERS)}")
    if launcher == "python" and num_ranks > 1:
        raise LaunchError(f"--launcher python: starts one rank, not {num_ranks}; use mpi")
    return launcher


def rank_command(
    launcher: str, num_ranks: int, target: str, arguments: Sequence[str]
) -> RankCommand:
    """The command that starts the ranks of a target; a script gets no arguments."""
    if is_script(target):
        argv = [sys.executable, str(script_path(target))]
    else:
        argv = [sys.executable, "-m", "lockstep", "train", target, *arguments]
    if launcher == "mpi":
        return mpirun_command(num_ranks, argv, cores=usable_cores())
    if launcher == "torchrun":
        return torchrun_command(num_ranks, argv)
    return python_command(argv)


def start(
    command: RankCommand,
    sitting: Sitting,
    threads: int,
    *,
    on_row: Callable[[dict[str, Any]], None],
    on_line: Callable[[str], None] = print,
) -> Ended:
    """Run ranks to their end."""
    assert sitting.run_dir is not None
    env = rank_environment(threads) | sitting.to_env()
    outcome = run_ranks(
        command, env, run_dir=Path(sitting.run_dir), on_row=on_row, on_line=on_line,
        on_notice=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    return _ended(outcome)


def start_shown(command: RankCommand, sitting: Sitting, threads: int) -> Ended:
    """Run ranks to their end, with their progress on the console."""
    view = Sinks([ConsoleView()])

    def on_row(row: dict[str, Any]) -> None:
        view(event_from_row(row))

    try:
        return start(command, sitting, threads, on_row=on_row)
    finally:
        view.close()


def _ended(outcome: Outcome) -> Ended:
    row = outcome.last
    if row is None and outcome.stopped_by is not None:
        stopped = signal.SIGINT if outcome.stopped_by == signal.SIGINT else signal.SIGTERM
        return Ended(128 + stopped, "stopped before the first step; nothing was saved")
    if row is None:
        message = _own_message(outcome.stderr_tail) or (
            f"the ranks ended with code {outcome.exit_code} before they had a result; their "
            f"messages are in {outcome.log}\n{outcome.stderr_tail}"
        )
        return Ended(outcome.exit_code or 1, message)
    if row["event"] == "Failed":
        return Ended(int(row["exit_code"]), str(row["message"]))
    return Ended(int(row["exit_code"]))


def _own_message(stderr: str) -> str:
    """The message a rank printed for the user, without what launchers print around it."""
    lines = stderr.splitlines()
    found = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    if found is None:
        return ""
    own = [lines[found].removeprefix("error: ")]
    for line in lines[found + 1 :]:
        if not line or line.startswith(("---", "W1", "E1", "prterun")):
            break
        own.append(line)
    return "\n".join(own)
