"""Ranks on the nodes of a Ray cluster: a placement group, an actor and an agent on each node.

This is the program that `--launcher ray` runs as its command; it connects to the cluster as a
driver and hosts the coordinator of the agents. Ray does the placing and the noticing: when a node
dies, it looks for room for the lost bundle, and starts the actor again there, whose agent then
joins. Actors and placement group belong to this driver, so Ray ends them with it, however it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, TextIO

from lockstep.errors import LaunchError, LockstepError
from lockstep.launching.host.coordinator import Coordinator
from lockstep.launching.host.group import KILLED
from lockstep.launching.host.line import Terms
from lockstep.launching.host.output_pump import pumped_output
from lockstep.launching.job.ray_node import PACKAGE, Node, Work, no_cluster, variables_of_ranks

_HOST_TIMEOUT_S = 5.0
_MEET_S = 30.0
_LOOK_S = 0.2
_NOTICE_S = 5.0
_NODE_GROUP = "ray.io/node-group"
"""The label of nodes that an autoscaler has started, and may start more of."""


@dataclass(frozen=True)
class Request:
    """What is to be started on a cluster.

    Attributes:
        address: of the cluster, as `HOST:PORT`, or `auto`.
        num_ranks: number of ranks.
        replacements: greatest number of processes to start in the place of killed ones.
        threads: number of threads of each rank, so of its cores.
        command: arguments of the interpreter in each rank.
        stop_file: environment variable with the path of the file with the reason of a stop.
        stops: the signals that reasons stand for.
        fd: file descriptor of a copy of a task from memory; None if there is none.
    """

    address: str
    num_ranks: int
    replacements: int
    threads: int
    command: tuple[str, ...]
    stop_file: str
    stops: Mapping[str, int]
    fd: int | None = None

    @property
    def argv(self) -> list[str]:
        """The program that starts it."""
        return [sys.executable, "-m", __name__, json.dumps(asdict(self))]

    @property
    def per_rank(self) -> Mapping[str, float]:
        """What a rank needs of a node, by Ray's names."""
        return {"CPU": self.threads}


def layout(
    num_ranks: int, nodes: Sequence[Mapping[str, float]], per_rank: Mapping[str, float]
) -> tuple[int, int] | None:
    """On how many agents the ranks are spread, and how many ranks each one starts.

    On as many nodes as there are, with one agent each and the same number of ranks; if that is not
    possible, with several agents on a node.

    Args:
        num_ranks: number of ranks.
        nodes: the resources of each node, by name.
        per_rank: the resources that a rank needs.

    Returns:
        Both numbers; None if the nodes are too small.
    """
    needs = per_rank.items()
    room = [min(int(node.get(name, 0) // need) for name, need in needs) for node in nodes]
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for size in sizes:
        if sum(ranks >= size for ranks in room) >= num_ranks // size:
            return num_ranks // size, size
    for size in reversed(sizes):
        if sum(ranks // size for ranks in room) >= num_ranks // size:
            return num_ranks // size, size
    return None


class _Coordinator(Coordinator):
    """The coordinator in a program without an agent of its own."""

    def __init__(self, listener: socket.socket, terms: Terms, token: str, out: TextIO) -> None:
        super().__init__(listener, terms, own="", token=token)
        self._out = out
        self._asked: list[int] = []
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, "wake")

    @property
    def exit_code(self) -> int | None:
        """The exit code of the run, once it has ended."""
        return self._ended

    @property
    def has_begun(self) -> bool:
        """Whether ranks were started."""
        return self._has_begun

    def ask(self, signum: int) -> None:
        """Pass a signal on to the ranks; from any thread, and from signal handlers."""
        self._asked.append(signum)
        with suppress(OSError):
            self._waker.send(b"s")

    def end(self, code: int) -> None:
        """End the run, if it has not yet begun; from any thread."""
        self.ask(-code)

    def _take(self, agent: Any, message: dict[str, Any]) -> None:
        if agent.id and "printed" in message:
            stream = self._out if message["stream"] == "stdout" else sys.stderr
            stream.buffer.write(message["printed"].encode("latin-1"))
            stream.flush()
        else:
            super()._take(agent, message)

    def look_at_clock(self) -> None:
        """See `Leader.look_at_clock`; what other threads have asked for is done here, too."""
        super().look_at_clock()
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        while self._asked:
            signum = self._asked.pop(0)
            if signum > 0:
                self._stop(None, signum)
            elif not self._has_begun:
                self._ended = -signum


class _Driver:
    """The driver of one launch.

    Args:
        request: what is to be started.
        ray: the module, connected to the cluster.
        out: stream that gets the ranks' standard output.
    """

    def __init__(self, request: Request, ray: Any, out: TextIO) -> None:
        self._request, self._ray = request, ray
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._hosts, self._ranks = self._layout(nodes)
        terms = Terms(
            version(PACKAGE), "", self._hosts, self._ranks, request.replacements, _HOST_TIMEOUT_S,
            request.command,
        )  # fmt: skip
        listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = listener.getsockname()
        self._work = Work(
            f"{host}:{port}", terms, os.getcwd(), _run_dir(), variables_of_ranks(request.stop_file),
            request.threads, secrets.token_hex(), _contents(request.fd),
        )  # fmt: skip
        self._coordinator = _Coordinator(listener, terms, self._work.token, out)

    def run(self) -> int:
        """Serve until the run has ended; its exit code."""
        group = self._ray.util.placement_group(
            [{name: need * self._ranks for name, need in self._request.per_rank.items()}]
            * self._hosts,
            strategy="SPREAD",
        )
        nodes = [self._node(group, bundle) for bundle in range(self._hosts)]
        try:
            for signum in (*_STOPPING, signal.SIGUSR2):
                signal.signal(signum, self._take_signal)
            self._coordinator.thread.start()
            self._watch(group, {node.run.remote(self._work): node for node in nodes})
            self._coordinator.thread.join()
        finally:
            for node in nodes:
                self._ray.kill(node)
            self._ray.util.remove_placement_group(group)
        if self._coordinator.exit_code is None:
            raise LaunchError("--launcher ray: the coordinator has failed; its error is above")
        return self._coordinator.exit_code

    def _layout(self, nodes: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """As `layout`, for a cluster that may grow.

        Raises:
            LaunchError: the cluster is too small.
        """
        per_rank, num_ranks = self._request.per_rank, self._request.num_ranks
        found = layout(num_ranks, [node["Resources"] for node in nodes], per_rank)
        if found is not None:
            return found
        if any(_NODE_GROUP in node.get("Labels", {}) for node in nodes):
            _say("the cluster is too small now; waiting for its autoscaler")
            return num_ranks, 1
        total = {name: sum(n["Resources"].get(name, 0) for n in nodes) for name in per_rank}
        raise LaunchError(
            f"-n {num_ranks}: the Ray cluster is too small: a rank needs {_named(per_rank)}, and "
            f"{len(nodes)} nodes have {_named(total)} in all; start fewer ranks, or add nodes"
        )

    def _node(self, group: Any, bundle: int) -> Any:
        """The actor of a bundle: Ray starts it, and what it runs, again wherever that moves to."""
        actor = self._ray.remote(max_restarts=-1, max_task_retries=-1)(Node)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return actor.options(
            num_cpus=self._request.threads * self._ranks,
            scheduling_strategy=strategy(group, placement_group_bundle_index=bundle),
        ).remote()

    def _watch(self, group: Any, runs: dict[Any, Any]) -> None:
        """Look after the agents until the run has ended."""
        notice_at = time.monotonic() + _NOTICE_S
        while self._coordinator.thread.is_alive():
            if not runs:
                self._coordinator.thread.join(_LOOK_S)
                continue
            for run in self._ray.wait([*runs], timeout=_LOOK_S)[0]:
                node = runs.pop(run)
                if self._is_again(run):
                    runs[node.run.remote(self._work)] = node
            if notice_at and time.monotonic() > notice_at:
                notice_at = 0.0
                if not group.wait(0):
                    _say(f"waiting for {self._hosts} x {_named(group.bundle_specs[0])}")

    def _is_again(self, run: Any) -> bool:
        """Whether an agent that has ended is to be started again on its node."""
        try:
            code, said = self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            code, said = LockstepError.exit_code, f"error: {_reason(error)}\n"
        if said:
            print(said, end="", file=sys.stderr, flush=True)
        if self._coordinator.exit_code is not None:
            return False
        if code > KILLED:  # it was killed, and its ranks with it
            return True
        if not self._coordinator.has_begun:
            self._coordinator.end(code or 1)
        return False

    def _take_signal(self, signum: int, _: object) -> None:
        if signum == signal.SIGUSR2:  # the launcher has written down what it has got itself
            with suppress(OSError, KeyError), open(os.environ[self._request.stop_file]) as file:
                signum = self._request.stops.get(file.read(), signum)
        self._coordinator.ask(signum)


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _run_dir() -> str:
    return str(json.loads(os.environ["LOCKSTEP_SESSION"])["run_dir"])


def _contents(fd: int | None) -> bytes:
    return b"" if fd is None else os.pread(fd, os.fstat(fd).st_size, 0)


def _named(resources: Mapping[str, float]) -> str:
    """Resources in words: 2 CPU and 1 GPU."""
    return " and ".join(f"{number:g} {name}" for name, number in resources.items())


def _reason(error: BaseException) -> str:
    """What an exception of Ray's says, in a line; of one that an actor has raised, its message."""
    text = str(getattr(error, "cause", None) or error).strip()
    return " ".join(text.splitlines()[-1:]) if "\n" in text else text


def _say(text: str) -> None:
    print(f"lockstep on Ray: {text}", file=sys.stderr, flush=True)


def connected(address: str) -> Any:
    """Ray, connected to a cluster as a driver.

    Raises:
        LaunchError: there is none at this address, or it has another version of Ray or Python.
    """
    import ray
    import ray.util.scheduling_strategies

    # `ray.init` may wait for minutes for a cluster that is gone.
    timer = threading.Timer(
        _MEET_S, _give_up, [no_cluster(address, f"no answer for {_MEET_S:g} s")]
    )
    timer.daemon = True
    timer.start()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise no_cluster(address, " ".join(str(error).split())) from None
    finally:
        timer.cancel()
    return ray


def _give_up(error: LockstepError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def main(request: Request, out: TextIO) -> int:
    """Be the driver; the exit code of the run.

    Args:
        request: what is to be started.
        out: stream that gets the ranks' standard output.

    Raises:
        LockstepError: the run cannot be started.
    """
    ray = connected(request.address)
    try:
        return _Driver(request, ray, out).run()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    code = 1
    with pumped_output():  # a reader that stalls must not stall the coordinator
        out = sys.stdout
        with redirect_stdout(sys.stderr):  # Ray prints what happens to it
            try:
                code = main(Request(**values | {"command": tuple(values["command"])}), out)
            except LockstepError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the store's threads may be anywhere
