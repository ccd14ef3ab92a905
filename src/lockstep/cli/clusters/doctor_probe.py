"""Small programs that ranks run to show that something works, under any launcher.

    mpirun -n 4 python -m lockstep.cli.clusters.doctor_probe collectives shared
    torchrun --nproc-per-node 4 -m lockstep.cli.clusters.doctor_probe collectives
    srun -n 4 python -m lockstep.cli.clusters.doctor_probe collectives
    mpirun --with-ft ulfm -n 3 python -m lockstep.cli.clusters.doctor_probe survive

Each rank prints a line of JSON for each thing it has tried; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.launching.rank.environment import Environment, detect
from lockstep.launching.rank.join import free_port

TIMEOUT_S = 30.0
"""Seconds that a rank waits for the others in one collective."""


def start(environment: Environment, backend: str) -> str:
    """Make the default process group of all ranks; returns the name of its library."""
    timeout = timedelta(seconds=TIMEOUT_S)
    if backend == "mpi4py":
        from mpi4py import MPI

        from lockstep.comm.backend import init_process_group

        init_process_group(timeout=timeout)
        library = MPI.Get_library_version().partition(",")[0]
    else:
        host = environment.master_addr or "127.0.0.1"
        port = environment.master_port or free_port()
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
        library = backend
    expect(dist.get_world_size(), environment.world_size)
    return library


def _all_reduce(device: torch.device) -> None:
    value = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(value)
    size = dist.get_world_size()
    expect(value.item(), size * (size + 1) / 2)


def _broadcast(device: torch.device) -> None:
    last = dist.get_world_size() - 1
    value = torch.tensor([float(dist.get_rank())], device=device)
    dist.broadcast(value, src=last)
    expect(value.item(), last)


def _all_gather(device: torch.device) -> None:
    size = dist.get_world_size()
    gathered = [torch.zeros(1, device=device) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())], device=device))
    expect([value.item() for value in gathered], list(range(size)))


def _all_to_all(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(size, device=device)
    dist.all_to_all_single(received, torch.arange(size, device=device) + 100.0 * rank)
    expect(received.tolist(), [100.0 * other + rank for other in range(size)])


def _reduce_scatter(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.zeros(1, device=device)
    parts = (torch.arange(size, device=device) + 100.0 * rank).view(size, 1)
    dist.reduce_scatter(own, list(parts))
    expect(own.item(), 100.0 * size * (size - 1) / 2 + size * rank)


COLLECTIVES: dict[str, Callable[[torch.device], object]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "barrier": lambda _: dist.barrier(),
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "reduce-scatter": _reduce_scatter,
}
"""What to try, by name."""


def expect(value: object, expected: object) -> None:
    """Check a result.

    Raises:
        ValueError: it is not as expected.
    """
    if value != expected:
        raise ValueError(f"got {value}, expected {expected}")


PATIENCE_S = 30.0
"""Seconds that a probe that kills a rank may take."""


def main(argv: list[str] | None = None) -> int:
    """Run the probes named on the command line, in that order; 1 if any failed on this rank."""
    parser = argparse.ArgumentParser(prog="python -m lockstep.cli.clusters.doctor_probe")
    parser.add_argument("probes", nargs="+", choices=["collectives", "shared", "survive"])
    parser.add_argument("--backend", choices=["mpi4py", "gloo", "nccl"])
    arguments = parser.parse_args(argv)
    environment = detect(os.environ)
    backend = arguments.backend or ("mpi4py" if environment.launcher == "mpi" else "gloo")
    report = _Report(environment.rank)
    for name in arguments.probes:
        if name == "collectives":
            _try_collectives(report, environment, backend)
        elif name == "shared":
            report.attempt(name, _try_shared)
        else:
            report.attempt(name, functools.partial(_try_survival, _Watch(report, name)))
    return 1 if report.failed else 0


class _Report:
    """Prints what this rank has tried."""

    def __init__(self, rank: int) -> None:
        self.failed = False
        self._rank = rank

    def attempt(self, name: str, probe: Callable[[], object]) -> bool:
        """Run a probe and print how it went; it returns a detail or raises."""
        try:
            ok, detail = True, str(probe() or "")
        except Exception as error:  # whatever it is, it is what the probe was for
            ok, detail = False, f"{type(error).__name__}: {error}"
        self.say(name, ok, detail)
        return ok

    def say(self, name: str, ok: bool, detail: str) -> None:
        """Print how a probe went."""
        self.failed |= not ok
        host = socket.gethostname()
        line = {"probe": name, "rank": self._rank, "host": host, "ok": ok, "detail": detail}
        # One write for the whole line, so that those of several ranks don't mix.
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class _Watch:
    """Ends the process with a message about its stage if a probe takes too long.

    Attributes:
        stage: name of the stage that the probe is in.
    """

    def __init__(self, report: _Report, name: str) -> None:
        self.stage = "start of MPI"
        self._report = report
        self._name = name
        self._timer = threading.Timer(PATIENCE_S, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """The probe is over."""
        self._timer.cancel()

    def _give_up(self) -> None:
        self._report.say(self._name, False, f"no end of the {self.stage} after {PATIENCE_S:g} s")
        os._exit(1)  # the main thread is in MPI


def _try_collectives(report: _Report, environment: Environment, backend: str) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
    if not report.attempt("start", lambda: start(environment, backend)):
        return
    for name, collective in COLLECTIVES.items():
        report.attempt(name, functools.partial(collective, device))
    report.attempt("end", dist.destroy_process_group)


def _try_shared() -> str:
    """Every rank of a host reads what the first one wrote into memory they share."""
    from mpi4py import MPI

    node: Any = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    window: Any = MPI.Win.Allocate_shared(8 if node.rank == 0 else 0, 8, comm=node)
    try:
        memory, _ = window.Shared_query(0)
        value = memoryview(memory).cast("B").cast("q")
        window.Fence()
        if node.rank == 0:
            value[0] = 4711
        window.Fence()
        expect(value[0], 4711)
    finally:
        window.Free()
    return "share memory"


def _try_survival(watch: _Watch) -> str:
    """Rank 1 is killed; the others notice, go on without it and compute together."""
    import mpi4py

    # With a rank lost, MPI_Finalize may wait for it for good (3 of 40 times with Open MPI 5.0.11).
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    watch.stage = "barrier with a dead rank"
    try:
        while True:
            # The first barrier shows that all have started; others may be in it still when rank 1
            # has left it and dies.
            world.Barrier()
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except MPI.Exception as error:
        expect(error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED), True)
    watch.stage = "shrinking"
    world.Revoke()
    survivors = world.Shrink()
    expect(survivors.size, world.size - 1)
    watch.stage = "sum of those that are left"
    expect(survivors.allreduce(1), world.size - 1)
    watch.stop()
    return "went on without the one that was killed"


if __name__ == "__main__":
    sys.exit(main())
