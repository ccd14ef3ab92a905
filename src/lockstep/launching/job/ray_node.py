"""A node of a Ray cluster: the actor that starts an agent there, and the program of that agent.

The agent is a child of the actor's process, since Ray's workers have threads, and ranks must be
forked from a clean process. It ends with the actor, and its ranks with it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from lockstep.errors import LaunchError, LockstepError
from lockstep.launching.host.agent import Agent
from lockstep.launching.host.line import Rendezvous, Terms
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import shell_code
from lockstep.launching.job.commands import rank_environment

PACKAGE = "lockstep-train"
"""Of which all nodes must have the same version."""

_PATIENCE_S = 60.0
_SAID_BYTES = 8192


@dataclass(frozen=True)
class Work:
    """What the agent on each node is to do.

    Attributes:
        rendezvous: address of the coordinator, as `HOST:PORT`.
        terms: what all agents agree on; its command is what each rank runs.
        folder: working directory of the ranks.
        run_dir: run directory, which the command has made.
        variables: environment variables of the ranks, besides those of the node.
        threads: number of threads of each rank.
        task: copy of a task from memory, which ranks inherit; empty if there is none.
    """

    rendezvous: str
    terms: Terms
    folder: str
    run_dir: str
    variables: Mapping[str, str]
    threads: int
    task: bytes = b""


def variables_of_ranks(stop_file: str) -> dict[str, str]:
    """The environment variables that the ranks get from this process: those of Lockstep."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("LOCKSTEP_") and name != stop_file
    }


class Node:
    """The actor on a node."""

    def run(self, work: Work) -> tuple[int, str]:
        """Run the agent of this node to its end.

        Returns:
            Its exit code, as shells have it, and the end of what it has written to standard error.

        Raises:
            LaunchError: it cannot be started here.
        """
        run_dir = os.path.join(work.folder, work.run_dir)
        for kind, folder in (("working", work.folder), ("run", run_dir)):
            if not os.path.isdir(folder):
                raise LaunchError(
                    f"{socket.gethostname()}: the {kind} directory {folder} is not there; choose "
                    "one that all nodes of the Ray cluster share"
                )
        with _inherited(work.task) as fds:
            program = [sys.executable, "-m", __name__, *map(str, fds)]
            agent = subprocess.Popen(
                bound_to_parent(program),
                cwd=work.folder,
                env={**os.environ, **work.variables},
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
            )
        values = asdict(work)
        del values["task"]
        _, said = agent.communicate(json.dumps(values).encode())
        return shell_code(agent.returncode), said[-_SAID_BYTES:].decode(errors="replace")


@contextmanager
def _inherited(task: bytes) -> Iterator[tuple[int, ...]]:
    """File descriptors of memory that has the copy of a task, if there is one."""
    if not task:
        yield ()
        return
    fd = os.memfd_create("lockstep-task")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(task)
        yield (fd,)
    finally:
        os.close(fd)


def serve(values: dict[str, Any], fds: tuple[int, ...]) -> int:
    """Be the agent of this node, in its main thread; returns its exit code.

    Args:
        values: the fields of a `Work`.
        fds: file descriptor of the copy of a task, which is the last argument of each rank.

    Raises:
        LockstepError: this node cannot take part in the run.
    """
    command = tuple(values["terms"]["command"])
    terms = Terms(**values["terms"] | {"command": command, "version": version(PACKAGE)})
    variables = rank_environment(values["threads"])
    os.environ.clear()
    os.environ.update(variables)
    argv = bound_to_parent([sys.executable, *terms.command, *map(str, fds)])
    where = Rendezvous.parse(values["rendezvous"])
    return Agent(where, terms, argv, _PATIENCE_S, is_led=True, fds=fds).run()


if __name__ == "__main__":
    try:
        code = serve(json.load(sys.stdin), tuple(map(int, sys.argv[1:])))
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)
