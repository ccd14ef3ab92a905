"""The end of a launch: its exit code, the message for the user, and whether to start again."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.engine.checkpoint.run_directory import rescued_paths
from lockstep.engine.run.loop import EXIT_CODES
from lockstep.errors import LockstepError
from lockstep.launching.api import Session
from lockstep.launching.job.run import Outcome
from lockstep.launching.rank.early import NOTHING_SAVED
from lockstep.launching.rank.process import PREEMPTED
from lockstep.launching.targets import is_script
from lockstep.observe import read_result
from lockstep.observe.text import resume_command

TRY_AGAIN = 75
"""The exit code of ranks that could not go on but can be started again (EX_TEMPFAIL)."""
_MPI_MESSAGES = ("*** Process received signal ***", "*** An error occurred in MPI_Init")
"""Messages of a process that crashes or aborts; mpirun may still end with code 0."""

_OTHERS = re.compile(r"---|prterun|error: |[WE]\d{4} ")
"""How a line begins that ends a rank's message; torchrun logs as "E0131 12:00:00"."""

_STOPPED = frozenset(EXIT_CODES.values()) - {TRY_AGAIN}
"""Exit codes of runs that were asked to stop."""


@dataclass(frozen=True)
class Ended:
    """How started ranks ended.

    Attributes:
        exit_code: exit code of the command.
        message: message for the user; empty if all went well.
        again: reason for starting the ranks again; empty if they should not be.
        last: row of the last `Failed` or `Finished` event, or the same from `result.json`; None
            without one.
        stopped_by: first signal to this process that requested a stop, if there was one.
    """

    exit_code: int
    message: str = ""
    again: str = ""
    last: dict[str, Any] | None = field(default=None, compare=False)
    stopped_by: signal.Signals | None = field(default=None, compare=False)


def how_ended(outcome: Outcome, session: Session, since: float, launcher: str) -> Ended:
    """The exit code and message for an outcome.

    The files of the run come first, since the exit code of a launcher may be that of any rank, or
    mean nothing.

    Args:
        outcome: outcome of the launch.
        session: request that the ranks got.
        since: start of the launch in Unix seconds.
        launcher: name of the launcher.
    """
    printed = _own_message(outcome.stderr_tail)
    run_dir = Path(str(session.run_dir))
    row = _last_row(outcome, printed, run_dir, since)
    if row is not None:
        ended = _by_row(row, outcome)
        target = session.target or ""
        message = "" if ended.exit_code else _of_script(outcome, printed, target, launcher)
        return Ended(_code(outcome, printed, launcher), message, last=row) if message else ended
    if outcome.stopped_by is not None:
        return _stopped(outcome, outcome.stopped_by, run_dir)
    code = _code(outcome, printed, launcher)
    # Ranks that end with a code and a message of their own would only do so again.
    if outcome.met and code != LockstepError.exit_code and not (printed and 0 < code < 128):
        message = f"all ranks have died (exit code {code}); see {outcome.log}"
        return Ended(code or 1, message, "all ranks have died")
    return _without_result(outcome, code, printed, session.target or "", launcher)


def _last_row(outcome: Outcome, printed: str, run_dir: Path, since: float) -> dict[str, Any] | None:
    if outcome.last is not None:
        return outcome.last
    if printed and outcome.exit_code == LockstepError.exit_code:
        return None  # the result of a run that these ranks were refused is another job's
    folders = [run_dir]
    if not printed:  # a run whose directory is gone, and whose ranks too
        folders += itertools.takewhile(Path.exists, rescued_paths(run_dir))
    rows = (_result(folder, since) for folder in folders)
    return next((row for row in rows if row is not None), None)


def _by_row(row: dict[str, Any], outcome: Outcome) -> Ended:
    code = int(row["exit_code"])
    if outcome.stopped_by is not None and code in _STOPPED:
        code = 128 + _asked(outcome.stopped_by)  # of several signals, the first one counts
    message = str(row["message"]) if row["event"] == "Failed" else ""
    again = (message or str(row["reason"])) if code == TRY_AGAIN else ""
    return Ended(code, message, again, row)


def _of_script(outcome: Outcome, printed: str, target: str, launcher: str) -> str:
    """How a script has failed beside its run, which has ended in order; empty if it has not.

    The body of a loop over `lockstep.steps`, or code after the run, may raise an exception.
    """
    code = outcome.exit_code
    if not (code and is_script(target)):
        return ""
    # The place is in no message of a rank that the others have refused.
    if f"(in {target}:" in printed:
        return printed
    if code == 1 and (raised := _traceback(outcome.stderr_tail)):
        return f"the run has ended in order, and its script with an exception:\n{raised}"
    # Of other launchers the code may be that of a rank which the others have survived.
    if launcher in ("python", "local") and code < 128:
        where = _where_to_look(outcome)
        return f"the run has ended in order, and its script with exit code {code}; {where}"
    return ""


def _code(outcome: Outcome, printed: str, launcher: str) -> int:
    """The exit code of ranks, of which one has said why."""
    if printed and launcher == "torchrun" and outcome.exit_code == 1:
        return LockstepError.exit_code  # 1 is torchrun's own, whatever the ranks' were
    return outcome.exit_code


def _stopped(outcome: Outcome, stopped_by: signal.Signals, run_dir: Path) -> Ended:
    lost = (
        "ended before a checkpoint was written; steps since the newest one are lost\n"
        f"go on with {resume_command(str(run_dir))}"
    )
    return Ended(128 + _asked(stopped_by), lost if outcome.met else NOTHING_SAVED)


def _without_result(outcome: Outcome, code: int, printed: str, target: str, launcher: str) -> Ended:
    """The end of ranks that left no result of the run."""
    # With fault tolerance, mpirun silently ends with code 0 if all ranks were killed.
    is_silent = not outcome.met and code == 0 and not printed and not is_script(target)
    # Before the run has begun there is no event, only the message of the survivors.
    has_message = bool(printed) and code == TRY_AGAIN
    is_lost = has_message or (launcher == "mpi" and (is_silent or _lost_at_start(outcome, printed)))
    if not is_lost and not outcome.met and code == 0 and is_script(target):
        return Ended(LockstepError.exit_code, _never_trains(target))
    message = printed or (
        f"the ranks ended with code {code} before they had a result; {_where_to_look(outcome)}"
    )
    is_signal = 128 < code <= 128 + signal.NSIG
    if is_lost and code > LockstepError.exit_code and not is_signal and code != TRY_AGAIN:
        code = LockstepError.exit_code  # MPI's own code says nothing outside of it
    lost = printed.partition("\n")[0] if has_message else "a rank ended before all had started"
    return Ended(code or 1, message, lost if is_lost else "")


def _where_to_look(outcome: Outcome) -> str:
    if not outcome.stderr_tail and _is_full(outcome.log):
        return f"no space is left for {outcome.log}, where they would have said why; free some"
    return f"their messages are in {outcome.log}\n{outcome.stderr_tail}".rstrip()


def _asked(signum: signal.Signals) -> signal.Signals:
    """The signal that the exit code of a stopped launch shows."""
    return signal.SIGTERM if signum == PREEMPTED else signum


def _is_full(path: Path) -> bool:
    """Whether no more can be written to a file."""
    try:
        return shutil.disk_usage(path).free == 0
    except OSError:
        return False


def _lost_at_start(outcome: Outcome, printed: str) -> bool:
    """Whether ranks over MPI have ended because one of them was killed before all had met.

    Ranks inside `MPI_Init` then abort with a code of the library's own, or crash there. Those past
    it print what has happened, and end with the code of `RankFailure`.
    """
    code = outcome.exit_code
    of_library = not printed and code not in (0, 1, LockstepError.exit_code)
    has_message = any(text in outcome.stderr_tail for text in _MPI_MESSAGES)
    return not outcome.met and (code == TRY_AGAIN or of_library or has_message)


def _result(run_dir: Path, since: float) -> dict[str, Any] | None:
    """The last event of a run according to `result.json`, where `events.jsonl` lacks it."""
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
    return "" if first is None else _written_from(lines, first).removeprefix("error: ")


def _traceback(stderr: str) -> str:
    """The newest traceback that a rank printed; empty without one."""
    # torch.distributed puts the rank before each line.
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in stderr.splitlines()]
    heads = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    of_ranks = [i for i in heads if "host/torchrun.py" not in "".join(lines[i + 1 : i + 2])]
    return _written_from(lines, of_ranks[-1]) if of_ranks else ""


def _written_from(lines: list[str], first: int) -> str:
    """The lines from one on, up to what launchers or other ranks print."""
    message_lines = itertools.takewhile(
        lambda line: line and not _OTHERS.match(line), lines[first + 1 :]
    )
    return "\n".join([lines[first], *message_lines])
