"""Commands of a campaign, and their processes as `/proc` shows them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.launching.host.processes import children, is_alive, send, variable

MARK = "CAMPAIGN_COMMAND"
"""Environment variable that holds a command's unique name; all its processes inherit it.

It does not begin as those of Lockstep: a process that has one of these is taken for a rank.
"""

CHECKOUT = Path(__file__).parents[2]
LOCKSTEP = Path(sys.executable).with_name("lockstep")

_LEAVES_S = 5.0
_POLL_S = 0.02

_ROLES = {
    "supervisor.py": "starter",
    "prterun": "starter",
    "mpirun": "starter",
    "proxy.py": "proxy",
    "watchdog.py": "watchdog",
}
"""What processes of a launch are, by the name of a program among their arguments."""


def environment(**more: str) -> dict[str, str]:
    """The variables of a bare login, and more: nothing that pytest or a launcher has set."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH") if name in os.environ}
    return {**kept, "TERM": "dumb", "COLUMNS": "200", **more}


class Command:
    """A command that runs, with all processes that come from it; none is left after a `with`.

    Args:
        argv: program and arguments.
        cwd: folder to start it in.
        env: all its environment variables.
        output: file that gets what it writes, by a pipe.
    """

    def __init__(
        self, argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str], output: Path
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._child = subprocess.Popen(
            [str(a) for a in argv],
            cwd=cwd,
            env={**env, MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    def _read(self, output: Path) -> None:
        assert self._child.stdout is not None
        with output.open("ab", buffering=0) as file, self._child.stdout as pipe:
            shutil.copyfileobj(pipe, file)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while the command runs."""
        return self._child.poll()

    def wait(self, limit_s: float) -> None:
        """Return when the command has ended, or after some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(limit_s)

    def processes(self) -> list[int]:
        """All that live, by number."""
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return sorted(p for p in pids if variable(p, MARK) == self._mark and is_alive(p))

    def role(self, role: str) -> list[int]:
        """The living processes with a role.

        Args:
            role: `launcher`, `server` (that ranks are forked from), `starter` (mpirun, or
                Lockstep's supervisor), `proxy`, `watchdog`, `rank`, or `all`.
        """
        pids = self.processes()
        return pids if role == "all" else [p for p in pids if self._role(p) == role]

    def left(self) -> list[str]:
        """The arguments of processes that have not gone in a few seconds; they are killed."""
        deadline = time.monotonic() + _LEAVES_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        shown = [" ".join(_arguments(pid))[:150] for pid in pids]
        self.kill()
        return shown

    def kill(self) -> None:
        """End everything that is still there."""
        while pids := self.processes():
            send(pids, signal.SIGKILL)
            self.ended()  # or it would stay
            time.sleep(_POLL_S)
        self.wait(_LEAVES_S)
        self._reader.join(_LEAVES_S)

    def _role(self, pid: int) -> str:
        arguments = _arguments(pid)
        if pid == self.pid:
            return "launcher"
        if pid in children(self.pid) and arguments == _arguments(self.pid):
            return "server"
        for argument in arguments:
            if role := _ROLES.get(os.path.basename(argument)):
                return role
        return "rank" if "lockstep" in arguments and "train" in arguments else "other"


def run(
    argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str], limit_s: float
) -> tuple[int | None, str]:
    """A command's exit code, or None if it took too long, and what it has written."""
    output = cwd / f".{uuid.uuid4().hex}"
    with Command(argv, cwd, env, output) as command:
        command.wait(limit_s)
        code = command.ended()
    written = output.read_text(errors="replace")
    output.unlink()
    return code, written


def indented(text: str, lines: int = 25) -> str:
    """The end of a text, to show below a row of a table."""
    return "\n".join(f"    | {line[:200]}" for line in text.splitlines()[-lines:])


def _arguments(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [
            a.decode(errors="replace")
            for a in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if a
        ]
    return []
