"""Starting ranks for a target and watching them to their end."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.engine.run.loop import EXIT_CODES
from lockstep.errors import LaunchError, LockstepError
from lockstep.front import Sitting
from lockstep.launchers.host.cores import usable_cores
from lockstep.launchers.host.output_pump import pumped_output
from lockstep.launchers.job.commands import (
    SILENCE_S,
    RankCommand,
    is_one_host,
    local_command,
    mpirun_command,
    python_command,
    rank_environment,
    torchrun_command,
)
from lockstep.launchers.job.run import Outcome, run_ranks
from lockstep.launchers.rank.early import NOTHING_SAVED
from lockstep.launchers.rank.signals import PREEMPTED
from lockstep.launchers.warm.stand_in import standing_in
from lockstep.observe import Sinks, event_from_row, read_result, view
from lockstep.observe.text import count, resume_command
from lockstep.targets import is_script, script_path

LAUNCHERS = ("python", "local", "mpi", "torchrun")

TRY_AGAIN = 75
"""The exit code of ranks that could not go on but can be started again (EX_TEMPFAIL)."""
_SAID_BY_MPI = ("*** Process received signal ***", "*** An error occurred in MPI_Init")
"""Of a process that crashes or aborts, after which mpirun may well leave with code 0."""

_MOST_DELAY_S = 60.0
_STOPPED = frozenset(EXIT_CODES.values()) - {TRY_AGAIN}


@dataclass(frozen=True)
class Ended:
    """How started ranks ended.

    Attributes:
        exit_code: exit code that the command is to leave with.
        message: message for the user; empty if all went well.
        again: reason for starting the ranks again; empty if they should not be.
        last: row of the last `Failed` or `Finished` event, or its like in `result.json`; None where
            there was none.
    """

    exit_code: int
    message: str = ""
    again: str = ""
    last: dict[str, Any] | None = field(default=None, compare=False)


def choose_launcher(launcher: str | None, num_ranks: int) -> str:
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
    if launcher not in LAUNCHERS:
        raise LaunchError(f"--launcher {launcher}: must be one of {', '.join(LAUNCHERS)}")
    if launcher == "python" and num_ranks > 1:
        raise LaunchError(f"--launcher python: starts one rank, not {num_ranks}; use mpi")
    return launcher


def check_replacements(launcher: str, replacements: int) -> None:
    """Refuse what a launcher can't do.

    Raises:
        LaunchError: killed ranks are to be replaced, and this launcher can't.
    """
    if replacements and launcher not in ("mpi", "local"):
        raise LaunchError(
            f"--replace {replacements}: the launcher {launcher} cannot replace ranks; use "
            "-n N --launcher mpi or local"
        )


def rank_command(
    launcher: str,
    num_ranks: int,
    target: str,
    arguments: Sequence[str],
    replacements: int = 0,
    server: str = "",
    silence_s: float = SILENCE_S,
) -> RankCommand:
    """The command that starts the ranks of a target; a script gets no arguments.

    Args:
        launcher: name of the launcher.
        num_ranks: number of ranks to start.
        target: recipe, file or script to train.
        arguments: what the ranks get behind the target.
        replacements: greatest number of processes to start in the place of killed ranks.
        server: the warm server that ranks are forked from; empty if there is none.
        silence_s: seconds after which a host that does not answer is lost; 0 for mpirun's own.
    """
    if is_script(target):
        argv = [sys.executable, str(script_path(target))]
    else:
        argv = [sys.executable, "-m", "lockstep", "train", target, *arguments]
    argv = standing_in(argv, server)
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
    sitting: Sitting,
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
        sitting: request that the ranks get by their environment.
        threads: number of threads of each rank.
        on_row: function that is called with the row of each new event.
        on_line: function that is called with each line of the ranks' standard output.
        restarts: greatest number of restarts without a committed step in between.
        env: further environment variables for the ranks.
    """
    assert sitting.run_dir is not None
    step = failures = 0

    def watch(row: dict[str, Any]) -> None:
        nonlocal step, failures
        if row["event"] == "StepDone" and row["step"] > step:
            step, failures = row["step"], 0
        on_row(row)

    while True:
        since = time.time()
        everything = rank_environment(threads) | sitting.to_env() | dict(env or {})
        try:
            with pumped_output():  # or ranks would not be looked after
                outcome = run_ranks(
                    command, everything, run_dir=Path(sitting.run_dir), on_row=watch,
                    on_line=on_line, on_notice=_notice,
                )  # fmt: skip
            ended = _ended(outcome, sitting, since, command.launcher)
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
        sitting = replace(sitting, resume=True)


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start_shown(
    command: RankCommand, sitting: Sitting, threads: int, on_started: Callable[[], None]
) -> Ended:
    """Run ranks to their end, shown on the console or in the notebook as `sitting` says.

    Args:
        command: command that starts the ranks.
        sitting: request that the ranks get by their environment.
        threads: number of threads of each rank.
        on_started: function that is called when the ranks have started the run.
    """
    with pumped_output():  # before there is a view, which may put a stream of its own there
        shown = view(sitting.quiet, per_rank=sitting.per_rank)
        with Sinks([shown]) as sinks:
            shown.wait(f"starting {count(command.num_ranks, 'rank')} ({command.launcher})")

            def show(row: dict[str, Any]) -> None:
                if row["event"] == "RunStarted":
                    on_started()
                sinks(event_from_row(row))

            return start(command, sitting, threads, on_row=show)


def _ended(outcome: Outcome, sitting: Sitting, since: float, launcher: str) -> Ended:
    """The exit code and message for an outcome.

    Args:
        outcome: outcome of the launch.
        sitting: request that the ranks got.
        since: start of the launch in Unix seconds.
        launcher: name of the launcher.
    """
    told = _own_message(outcome.stderr_tail)
    row = outcome.last
    # The result of a run that these ranks were refused is another job's.
    if row is None and not (told and outcome.exit_code == LockstepError.exit_code):
        run_dir = Path(str(sitting.run_dir))
        row = _result(run_dir, since)
        if row is None and not told:  # of a run whose directory is gone, and whose ranks too
            row = _result(run_dir.with_name(f"{run_dir.name}-rescued"), since)
    if row is not None:
        code = int(row["exit_code"])
        if outcome.stopped_by is not None and code in _STOPPED:
            code = 128 + _asked(outcome.stopped_by)  # of several signals, the first one counts
        message = str(row["message"]) if row["event"] == "Failed" else ""
        again = (message or str(row["reason"])) if code == TRY_AGAIN else ""
        return Ended(code, message, again, row)
    code = outcome.exit_code
    if told and launcher == "torchrun" and code == 1:  # its own, whatever the ranks' codes were
        code = LockstepError.exit_code
    if outcome.stopped_by is not None:
        stopped = _asked(outcome.stopped_by)
        lost = (
            "ended before a checkpoint was written; steps since the newest one are lost\n"
            f"go on with {resume_command(str(sitting.run_dir))}"
        )
        return Ended(128 + stopped, lost if outcome.met else NOTHING_SAVED)
    # Ranks that leave with a code of their own, and say why, would only do so again.
    if outcome.met and code != LockstepError.exit_code and not (told and 0 < code < 128):
        message = f"all ranks have died (exit code {code}); see {outcome.log}"
        return Ended(code or 1, message, "all ranks have died")
    target = sitting.target or ""
    # mpirun with fault tolerance leaves with code 0 where all ranks were killed, and says nothing.
    is_silent = not outcome.met and code == 0 and not told and not is_script(target)
    # Survivors that say it before there is a run have no event that would.
    is_said = bool(told) and code == TRY_AGAIN
    is_lost = is_said or (launcher == "mpi" and (is_silent or _lost_at_start(outcome, told)))
    lost = told.partition("\n")[0] if is_said else "a rank ended before all had started"
    if not is_lost and not outcome.met and code == 0 and is_script(target):
        return Ended(LockstepError.exit_code, _never_trains(target))
    where = f"their messages are in {outcome.log}\n{outcome.stderr_tail}".rstrip()
    if not outcome.stderr_tail and _is_full(outcome.log):
        where = f"no space is left for {outcome.log}, where they would have said why; free some"
    message = told or f"the ranks ended with code {code} before they had a result; {where}"
    if is_lost and LockstepError.exit_code < code < 128 and code != TRY_AGAIN:
        code = LockstepError.exit_code  # MPI's own code says nothing outside of it
    return Ended(
        code or 1,
        message,
        lost if is_lost else "",
    )


def _asked(signum: signal.Signals) -> signal.Signals:
    """The signal whose number tells what a launch was stopped by."""
    return signal.SIGTERM if signum == PREEMPTED else signum


def _is_full(path: Path) -> bool:
    """Whether no more can be written to a file."""
    try:
        return shutil.disk_usage(path).free == 0
    except OSError:
        return False


def _lost_at_start(outcome: Outcome, told: str) -> bool:
    """Whether ranks over MPI have ended because one of them was killed before all had met.

    Those that are in `MPI_Init` meanwhile abort with a code of the library's own, or crash there;
    those past it say what has happened, and leave with the code of `RankFailure`.
    """
    code = outcome.exit_code
    of_library = not told and code not in (0, 1, LockstepError.exit_code)
    is_said = any(text in outcome.stderr_tail for text in _SAID_BY_MPI)
    return not outcome.met and (code == TRY_AGAIN or of_library or is_said)


def _result(run_dir: Path, since: float) -> dict[str, Any] | None:
    """The last event of a run as its `result.json` tells, where `events.jsonl` does not."""
    try:
        path = run_dir / "result.json"
        if path.stat().st_mtime < since:
            return None
        result = read_result(path)
        event = "Failed" if result["status"] == "failed" else "Finished"
        return {"event": event, "message": result["reason"]} | result
    except (OSError, LockstepError):
        return None


def _never_trains(script: str) -> str:
    """The message for a script that has ended without training."""
    tree = ast.parse(Path(script).read_bytes())
    bases = {node.name: node.bases for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    tasks = [name for name, kinds in bases.items() if any("Task" in ast.unparse(b) for b in kinds)]
    return (
        f"{script}: ended without calling lockstep.main; call it, or name a Task class to have "
        f"it trained: {', '.join(f'{script}:{name}' for name in tasks or ['Task'])}"
    )


def _own_message(stderr: str) -> str:
    """The message a rank printed for the user, without what launchers print around it."""
    lines = stderr.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    if first is None:
        return ""
    own = [lines[first].removeprefix("error: ")]
    for line in lines[first + 1 :]:
        if not line or line.startswith(("---", "W1", "E1", "prterun")):
            break
        own.append(line)
    return "\n".join(own)
