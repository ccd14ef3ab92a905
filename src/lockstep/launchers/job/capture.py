"""Running ranks for their output: short probes, not training."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.launchers.host.processes import MARK, kill_marked
from lockstep.launchers.host.tether import tethered
from lockstep.launchers.job.commands import RankCommand

_TERMINATE_S = 3.0


@dataclass(frozen=True)
class Captured:
    """The result of a command.

    Attributes:
        exit_code: exit code of the command, negative for a signal; None if it ran out of time.
        stdout: text the command wrote to standard output.
        stderr: text the command wrote to standard error.
    """

    exit_code: int | None
    stdout: str
    stderr: str


def capture(command: RankCommand, env: Mapping[str, str], timeout_s: float) -> Captured:
    """Run a command that starts ranks; none of its processes is left on return.

    Args:
        command: command to run.
        env: all environment variables of the command.
        timeout_s: time in seconds after which the command is killed.
    """
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        tethered(command.argv),
        env={**env, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # mpirun clears its ranks' shared memory if it is asked to end; killed, it can't.
            child.terminate()
            try:
                stdout, stderr = child.communicate(timeout=_TERMINATE_S)
            except subprocess.TimeoutExpired:
                kill_marked(mark)
                child.kill()
                stdout, stderr = child.communicate()
            return Captured(None, stdout, stderr)
        finally:
            kill_marked(mark)
    return Captured(child.returncode, stdout, stderr)
