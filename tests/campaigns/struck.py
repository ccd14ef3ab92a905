"""Runs that are struck: starting their sessions, striking, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tests.campaigns.blows import KEYS, TASKS, Blow, Plan, Session, Task
from tests.campaigns.commands import CHECKOUT, LOCKSTEP, Command, environment, indented, run

Rows: TypeAlias = list[tuple[str, ...]]

_LIMIT_S = 90.0
"""How long a session may take, in seconds."""

_POLL_S = 0.002
_READS_S = 60.0
_KEPT = ("status", "step", "metrics", "params_sha256", "carry_sha256", "tables_sha256")
_TIMES = ("samples_per_s", "compute_efficiency")


@dataclass(frozen=True)
class Reference:
    """What a run that nothing strikes has come to.

    Attributes:
        outcome: what `result.json` says of it.
        rows: of its metrics.
    """

    outcome: dict[str, Any]
    rows: Rows


@dataclass
class Struck:
    """A run that was struck, and what is wrong with it."""

    plan: Plan
    blows: list[Blow] = field(default_factory=list)
    sessions: int = 0
    started: list[Command] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def table(self, kills: int) -> str:
        """Its rows of the table; `kills` are those of the campaign so far."""
        verdict = "; ".join(self.wrong) or "equal"
        first = f"{self.plan.number:4} {self.plan.task:7} {kills:4} kills  {verdict}"
        return "\n".join([first, *(f"      {line}" for line in self.lines)])


def reference(task: Task, folder: Path) -> Reference:
    """Train a task on one process, undisturbed."""
    folder.mkdir()
    argv = [LOCKSTEP, "train", task.target, *KEYS, *task.keys, "--run-dir", "run"]
    code, output = run(argv, folder, _environment(), _LIMIT_S)
    if code != 0:
        raise SystemExit(f"{task.target}: exit code {code} undisturbed\n{output}")
    return Reference(_outcome(folder / "run"), _rows(folder / "run"))


def train(plan: Plan, folder: Path, expected: Reference) -> Struck:
    """Do all sessions of a run until it is complete, and look at what it has come to."""
    folder.mkdir()
    struck = Struck(plan)
    with contextlib.ExitStack() as started:
        for session in plan.sessions:
            code = _sit(struck, session, folder, started)
            if struck.wrong:
                return struck
            if code == 0:
                break
        struck.wrong += [f"left behind: {left}" for c in struck.started if (left := c.left())]
    found = _outcome(folder / "run")
    struck.wrong += [
        f"{key} is {found.get(key)}, expected {value}"
        for key, value in expected.outcome.items()
        if found.get(key) != value
    ]
    if _rows(folder / "run") != expected.rows:
        struck.wrong.append("other rows in metrics.csv")
    return struck


def _sit(
    struck: Struck, session: Session, folder: Path, started: contextlib.ExitStack
) -> int | None:
    """One session: its exit code, with what is wrong noted in `struck`."""
    struck.sessions += 1
    output = folder / f"output.{struck.sessions}"
    events = folder / "run" / "events.jsonl"
    since = time.monotonic()
    strikes = _Strikes(session.blows, events)
    command = started.enter_context(
        Command(_argv(struck.plan, session, folder), folder, _environment(), output)
    )
    strikes.begin(command)
    while command.ended() is None and time.monotonic() < since + _LIMIT_S:
        strikes.look()
        time.sleep(_POLL_S)
    strikes.end()
    code = command.ended()
    struck.blows += strikes.done
    blows = ", ".join(map(str, strikes.done)) or "–"
    struck.lines.append(f"{session}: {blows}: exit {code}, {time.monotonic() - since:.1f} s")
    if code is None:
        struck.wrong.append(f"hangs for more than {_LIMIT_S:g} s")
        struck.lines += [f"left: {line}" for line in command.left()]
    elif code not in strikes.codes():
        struck.wrong.append(f"exit code {code}, expected {sorted(strikes.codes())}")
    elif session.is_hasty:
        struck.started.append(command)
    elif left := command.left():
        struck.wrong.append(f"left behind: {left}")
    if not struck.wrong:
        struck.wrong += _unreadable(folder)
    written = output.read_text(errors="replace")
    if "Traceback" in written:
        struck.wrong.append("a traceback is shown")
    if struck.wrong:
        struck.lines.append(f"{output}:\n{indented(written)}")
    return code


def _argv(plan: Plan, session: Session, folder: Path) -> list[str | Path]:
    task = TASKS[plan.task]
    ranks = ["-n", str(session.num_ranks), "--launcher", session.launcher]
    replace = ["--replace", str(session.replace)] if session.replace else []
    if _has_checkpoint(folder / "run"):
        return [LOCKSTEP, "resume", "run", *ranks, *replace, *session.overrides]
    keys = [*KEYS, *task.keys, *session.overrides]
    return [LOCKSTEP, "train", task.target, *ranks, *replace, *keys, "--run-dir", "run", "--resume"]


def _has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step_*"))


class _Strikes:
    """The blows of a session, each when its moment has come."""

    def __init__(self, blows: Sequence[Blow], events: Path) -> None:
        self.done: list[Blow] = []
        self._left = list(blows)
        self._events = events
        self._offset = events.stat().st_size if events.exists() else 0
        self._rest = b""
        self._step = 0
        self._is_over = False
        self._due: float | None = None
        self._paused: list[tuple[float, list[int]]] = []
        self._launcher_codes: set[int] = set()

    def begin(self, command: Command) -> None:
        self._command = command
        self._since = time.monotonic()

    def look(self) -> None:
        """Strike if it is time."""
        self._read()
        now = time.monotonic()
        for until, pids in list(self._paused):
            if now >= until:
                self._continue(pids)
        if not self._left:
            return
        if self._due is None and self._has_come(self._left[0]):
            self._due = now + self._left[0].delay_s
        if self._due is not None and now >= self._due:
            self._strike(self._left.pop(0))
            self._due = None

    def end(self) -> None:
        """Let go on what is paused still, and read the last events."""
        self._read()
        for _, pids in list(self._paused):
            self._continue(pids)

    def codes(self) -> set[int]:
        """Exit codes that the session may have."""
        signals = {blow.signum for blow in self.done if blow.signum in _ASKED}
        asked = {128 + signum for signum in signals}
        if self._is_over:  # nothing takes signals while the interpreter ends
            asked |= {-signum for signum in signals}
        return {0} | asked | self._launcher_codes

    def _has_come(self, blow: Blow) -> bool:
        if blow.phase == "start":
            self._due = self._since + blow.delay_s
            return False
        return (blow.phase == "again" and bool(self.done)) or self._step >= blow.step

    def _strike(self, blow: Blow) -> None:
        pids = self._command.role(
            blow.role.removesuffix("s") if blow.role == "ranks" else blow.role
        )
        if not pids:
            return
        if not blow.is_for_many:
            pids = [pids[int(blow.which * len(pids))]]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, blow.signum)
        if blow.signum == signal.SIGKILL and self._command.pid in pids:
            self._launcher_codes.add(-signal.SIGKILL)
        if blow.pause_s:
            self._paused.append((time.monotonic() + blow.pause_s, pids))
        self.done.append(blow)

    def _continue(self, pids: list[int]) -> None:
        self._paused = [(until, some) for until, some in self._paused if some is not pids]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._events.open("rb") as file:
            file.seek(self._offset)
            *lines, self._rest = (self._rest + file.read()).split(b"\n")
            self._offset = file.tell()
            for line in lines:
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    self._is_over = row["event"] == "Finished"
                    if row["event"] == "StepDone":
                        self._step = row["step"]


_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _unreadable(folder: Path) -> list[str]:
    """What commands that read a run say of this one that they should not."""
    if not (folder / "run" / "run.json").exists():
        return []
    wrong = []
    for argv in (["runs", "list", "."], ["report", "run", "--output", "page.html"]):
        code, output = run([LOCKSTEP, *argv], folder, _environment(), _READS_S)
        if code != 0 or "Traceback" in output:
            wrong.append(f"lockstep {argv[0]}: exit code {code}\n{indented(output)}")
    return wrong


def _environment() -> dict[str, str]:
    return environment(PYTHONPATH=str(CHECKOUT))


def _outcome(run_dir: Path) -> dict[str, Any]:
    """What `result.json` says, without what differs between sessions."""
    with contextlib.suppress(OSError):
        result = json.loads((run_dir / "result.json").read_text())
        return {key: result.get(key) for key in _KEPT}
    return {}


def _rows(run_dir: Path) -> Rows:
    """What `metrics.csv` says of training and evaluations, without times."""
    with contextlib.suppress(OSError), (run_dir / "metrics.csv").open() as file:
        return [
            tuple(v for k, v in row.items() if not k.endswith("_s") and k not in _TIMES)
            for row in csv.DictReader(file)
        ]
    return []
