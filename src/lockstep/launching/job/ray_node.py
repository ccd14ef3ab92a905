"""The nodes of a Ray cluster: whether its head answers, and the actor that starts an agent on each.

The agent is a child of the actor's process, since Ray's workers have threads, and ranks must be
forked from a clean process. It ends with the actor, and its ranks with it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError, LockstepError
from lockstep.launching.host.agent import Agent
from lockstep.launching.host.line import TOKEN, Rendezvous, Terms
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.host.processes import shell_code
from lockstep.launching.job.commands import rank_environment

PACKAGE = "lockstep-train"
"""Of which all nodes must have the same version."""

OLDEST, BEFORE = (2, 40), (3,)
"""Versions of Ray that are known to work: from the first one on, before the second one."""

_CONNECT_S = 3.0
_ADDRESS = r"[^\s:/]+:\d{1,5}"
_STATUS = re.compile(rb"grpc-status(\x01\d|\x02\d\d)")
_FOR_TOKENS = "it wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
_PATIENCE_S = 60.0
_SAID_BYTES = 8192


def check_ray(address: str) -> None:
    """Refuse to start ranks on a Ray cluster without a Ray that is known to work.

    Args:
        address: of the cluster, `HOST:PORT` or `auto`.

    Raises:
        LaunchError: Ray is not installed, is of another version, or no cluster has this address.
    """
    install = "`pip install 'lockstep-train[ray]'`"
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise LaunchError(f"--launcher ray: Ray is not installed; {install}") from None
    number = tuple(map(int, re.findall(r"\d+", installed)[:2]))
    if not OLDEST <= number < BEFORE:
        oldest, before = (".".join(map(str, limit)) for limit in (OLDEST, BEFORE))
        raise LaunchError(
            f"--launcher ray: Ray {installed} is installed, and must be at least {oldest} and "
            f"before {before}; {install}, and the same version on all nodes"
        )
    if address != "auto" and not re.fullmatch(_ADDRESS, address):
        raise LaunchError(
            f"--ray-address (or RAY_ADDRESS) {address}: must be HOST:PORT of the cluster's head "
            "node, or auto; for ray:// and https:// submit the command as a job: `ray job submit "
            "-- lockstep train …`"
        )
    reasons = [_silence(known) for known in (_known_here() if address == "auto" else [address])]
    if all(reasons):
        raise no_cluster(address, next(iter(reasons), "Ray does not run on this host"))


def _known_here() -> set[str]:
    """Where clusters are that have a node on this host, or that `ray start` was told of."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    found = {os.environ.get("RAY_ADDRESS", "")}
    with suppress(OSError):
        found.add(Path(folder, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip())
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            found |= {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    return {address for address in found if re.fullmatch(_ADDRESS, address)}


def _silence(address: str) -> str:
    """Why no cluster can be at an address, asked in a moment; empty if one is there."""
    host, _, port = address.rpartition(":")
    answer, deadline = b"", time.monotonic() + _CONNECT_S
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return ""
            connection.sendall(_is_alive(address))
            while not _STATUS.search(answer) and (more := connection.recv(4096)):
                answer += more
                connection.settimeout(max(0.001, deadline - time.monotonic()))
    except TimeoutError:
        return f"no answer for {_CONNECT_S:g} s"
    except (OSError, OverflowError, UnicodeError) as error:
        return str(error)
    if b"application/grpc" not in answer:
        return "what answers is no cluster"
    status = _STATUS.search(answer)
    is_refused = (
        status is not None
        and status[0].endswith(b"16")
        and os.environ.get("RAY_AUTH_MODE") != "token"
    )
    return _FOR_TOKENS if is_refused else ""


def _is_alive(address: str) -> bytes:
    """Asks a cluster's head whether it is alive: a call of gRPC, which Ray answers in plain text.

    Ray itself would take seconds to import, and wait for half a minute.
    """
    path, own = b"/ray.rpc.NodeInfoGcsService/CheckAlive", address.encode()
    fields = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    head = b"\x83\x86\x04" + _text(path) + b"\x01" + _text(own)  # POST, http, path, authority
    head += b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    frames = [(4, 0, 0, b""), (1, 4, 1, head), (0, 1, 1, bytes(5))]  # settings, headers, no data
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for kind, flags, stream, body in frames:
        sent += len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
        sent += body
    return sent


def _text(text: bytes) -> bytes:
    return bytes([min(len(text), 126)]) + text[:126]


def no_cluster(address: str, reason: str) -> LaunchError:
    """The error that there is no cluster at an address."""
    return LaunchError(
        f"--ray-address {address}: no Ray cluster answers there ({reason}); start one with "
        "`ray start --head`, and this command on one of its nodes"
    )


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
        token: secret of the agents of this run.
        task: copy of a task from memory, which ranks inherit; empty if there is none.
    """

    rendezvous: str
    terms: Terms
    folder: str
    run_dir: str
    variables: Mapping[str, str]
    threads: int
    token: str
    task: bytes = b""


def variables_of_ranks(stop_file: str) -> dict[str, str]:
    """The environment variables that the ranks get from this process: those of Lockstep.

    The secret of agents is none of them: ranks need not know it, and a run on Ray has its own.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("LOCKSTEP_") and name not in (stop_file, TOKEN)
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
    variables.pop(TOKEN, None)  # of this node
    os.environ.clear()
    os.environ.update(variables)
    argv = bound_to_parent([sys.executable, *terms.command, *map(str, fds)])
    where = Rendezvous.parse(values["rendezvous"])
    return Agent(where, terms, argv, _PATIENCE_S, is_led=True, fds=fds, token=values["token"]).run()


if __name__ == "__main__":
    try:
        code = serve(json.load(sys.stdin), tuple(map(int, sys.argv[1:])))
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)
