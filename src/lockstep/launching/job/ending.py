"""How a launch has ended: its exit code, what to tell the user, and whether to start again."""

from __future__ import annotations

import ast
import itertools
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.engine.checkpoint.run_directory import rescued_paths
from lockstep.engine.run.loop import EXIT_CODES
from lockstep.errors import LockstepError
from lockstep.launching.front import Session
from lockstep.launching.job.run import Outcome
from lockstep.launching.rank.early import NOTHING_SAVED
from lockstep.launching.rank.process import PREEMPTED
from lockstep.launching.targets import is_script
from lockstep.observe import read_result
from lockstep.observe.text import resume_command

TRY_AGAIN = 75
"""The exit code of ranks that could not go on but can be started again (EX_TEMPFAIL)."""
_SAID_BY_MPI = ("*** Process received signal ***", "*** An error occurred in MPI_Init")
"""Of a process that crashes or aborts, after which mpirun may well leave with code 0."""

_STOPPED = frozenset(EXIT_CODES.values()) - {TRY_AGAIN}
"""Exit codes of runs that were asked to stop."""


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


def how_ended(outcome: Outcome, session: Session, since: float, launcher: str) -> Ended:
    """The exit code and message for an outcome.

    What the run has written counts first, since the exit code of a launcher may be that of any
    rank, or say nothing.

    Args:
        outcome: outcome of the launch.
        session: request that the ranks got.
        since: start of the launch in Unix seconds.
        launcher: name of the launcher.
    """
    told = _own_message(outcome.stderr_tail)
    run_dir = Path(str(session.run_dir))
    row = _last_row(outcome, told, run_dir, since)
    if row is not None:
        return _as_written(row, outcome)
    if outcome.stopped_by is not None:
        return _stopped(outcome, outcome.stopped_by, run_dir)
    code = outcome.exit_code
    if told and launcher == "torchrun" and code == 1:  # its own, whatever the ranks' codes were
        code = LockstepError.exit_code
    # Ranks that leave with a code of their own, and say why, would only do so again.
    if outcome.met and code != LockstepError.exit_code and not (told and 0 < code < 128):
        message = f"all ranks have died (exit code {code}); see {outcome.log}"
        return Ended(code or 1, message, "all ranks have died")
    return _without_result(outcome, code, told, session.target or "", launcher)


def _last_row(outcome: Outcome, told: str, run_dir: Path, since: float) -> dict[str, Any] | None:
    if outcome.last is not None:
        return outcome.last
    if told and outcome.exit_code == LockstepError.exit_code:
        return None  # the result of a run that these ranks were refused is another job's
    folders = [run_dir]
    if not told:  # a run whose directory is gone, and whose ranks too
        folders += itertools.takewhile(Path.exists, rescued_paths(run_dir))
    rows = (_result(folder, since) for folder in folders)
    return next((row for row in rows if row is not None), None)


def _as_written(row: dict[str, Any], outcome: Outcome) -> Ended:
    code = int(row["exit_code"])
    if outcome.stopped_by is not None and code in _STOPPED:
        code = 128 + _asked(outcome.stopped_by)  # of several signals, the first one counts
    message = str(row["message"]) if row["event"] == "Failed" else ""
    again = (message or str(row["reason"])) if code == TRY_AGAIN else ""
    return Ended(code, message, again, row)


def _stopped(outcome: Outcome, stopped_by: signal.Signals, run_dir: Path) -> Ended:
    lost = (
        "ended before a checkpoint was written; steps since the newest one are lost\n"
        f"go on with {resume_command(str(run_dir))}"
    )
    return Ended(128 + _asked(stopped_by), lost if outcome.met else NOTHING_SAVED)


def _without_result(outcome: Outcome, code: int, told: str, target: str, launcher: str) -> Ended:
    """Of ranks that have ended before the run had any result."""
    # mpirun with fault tolerance leaves with code 0 where all ranks were killed, and says nothing.
    is_silent = not outcome.met and code == 0 and not told and not is_script(target)
    # Survivors that say it before there is a run have no event that would.
    is_said = bool(told) and code == TRY_AGAIN
    is_lost = is_said or (launcher == "mpi" and (is_silent or _lost_at_start(outcome, told)))
    if not is_lost and not outcome.met and code == 0 and is_script(target):
        return Ended(LockstepError.exit_code, _never_trains(target))
    message = told or (
        f"the ranks ended with code {code} before they had a result; {_where_to_look(outcome)}"
    )
    if is_lost and LockstepError.exit_code < code < 128 and code != TRY_AGAIN:
        code = LockstepError.exit_code  # MPI's own code says nothing outside of it
    lost = told.partition("\n")[0] if is_said else "a rank ended before all had started"
    return Ended(code or 1, message, lost if is_lost else "")


def _where_to_look(outcome: Outcome) -> str:
    if not outcome.stderr_tail and _is_full(outcome.log):
        return f"no space is left for {outcome.log}, where they would have said why; free some"
    return f"their messages are in {outcome.log}\n{outcome.stderr_tail}".rstrip()


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
