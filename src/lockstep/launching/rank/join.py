"""Joining the other ranks: the transport that fits where this process is."""

from __future__ import annotations

import functools
import os
import socket
import sys

import torch

from lockstep.comm.torchdist.store import LOOPBACK
from lockstep.comm.transport import LocalTransport, Transport
from lockstep.errors import EnvironError, alone
from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.rank.environment import REPLACE, SIZE, SLOT, Environment
from lockstep.launching.warm.proxy import SERVER, through_proxy

_has_opened = False


def open_transport(
    environment: Environment,
    device: torch.device,
    timeout_s: float,
    start_timeout_s: float | None = None,
) -> Transport:
    """Meet the other ranks; every rank calls this.

    A single process gets a `LocalTransport`, whichever launcher started it.

    Args:
        environment: place of this process among the ranks.
        device: device on which the tensors to move lie.
        timeout_s: seconds to wait for other ranks, where the transport has a timeout.
        start_timeout_s: seconds to wait until rank 0 is there, if that is another time.

    Raises:
        EnvironError: the ranks that MPI knows are not those the launcher started, or the name of
            rank 0's host is unknown here.
    """
    global _has_opened
    # A new process begins with a script's first training, and can join only that one.
    is_first, _has_opened = not _has_opened, True
    if environment.world_size == 1:
        return LocalTransport()
    if environment.launcher != "mpi":
        assert environment.master_addr is not None
        assert environment.master_port is not None
        address = (environment.master_addr, environment.master_port)
        # SLURM gives all ranks the same number of ranks on a host.
        if environment.launcher == "slurm" and environment.is_one_host:
            address = (LOOPBACK, environment.master_port)
        if environment.supervisor_fd is not None:
            from lockstep.comm.torchdist.elastic_transport import ElasticTransport

            return ElasticTransport(
                _backend(device), address, environment.supervisor_fd, environment.rank, timeout_s,
                device, environment.joins and is_first, environment.address,
                environment.host_timeout_s,
            )  # fmt: skip
        return _process_group(environment, device, timeout_s, address, start_timeout_s)
    return _over_mpi(environment, device, timeout_s, is_first)


def free_port() -> int:
    """A TCP port on which nothing on this host listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _over_mpi(
    environment: Environment, device: torch.device, timeout_s: float, is_first: bool
) -> Transport:
    try:
        from lockstep.comm.mpi.library import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises the second kind
        reason = str(error).strip().splitlines()[-1]
        text = f"no MPI library can be loaded ({reason}); `lockstep doctor` checks what is there"
        if folders := os.environ.get("LD_LIBRARY_PATH"):
            text = (
                f"LD_LIBRARY_PATH={folders}: no MPI library can be loaded ({reason}); unset it, or "
                "put the folder of the library that belongs to mpi4py first"
            )
        raise alone(EnvironError(text)) from None

    world = MPI.COMM_WORLD
    place = (0, 1) if environment.joins else (environment.rank, environment.world_size)
    if (world.rank, world.size) != place:
        raise EnvironError(
            f"mpirun started rank {environment.rank} of {environment.world_size}, but mpi4py sees "
            f"rank {world.rank} of {world.size}: they belong to different MPI libraries "
            f"(mpi4py uses {MPI.Get_library_version().split(',')[0]}); use the mpirun of "
            "that library, and `lockstep doctor` to check"
        )
    if device.type == "cpu":
        from lockstep.comm.mpi.growth import Growth
        from lockstep.comm.mpi.transport import MpiTransport

        if not (is_first and environment.replacements):
            return MpiTransport()
        argv = functools.partial(_joiner_argv, environment)
        return MpiTransport(
            Growth(environment.world_size, environment.replacements, argv, environment.joins)
        )
    # On a single host, its own name need not be known to any resolver.
    meeting_point = (LOOPBACK if environment.is_one_host else socket.gethostname(), free_port())
    address = world.bcast(meeting_point if world.rank == 0 else None)
    return _process_group(environment, device, timeout_s, address)


def _joiner_argv(environment: Environment, number: int) -> list[str]:
    """The command of joining rank `number`, from 0: this process's own, with other variables."""
    variables = {
        SLOT: environment.world_size + number,
        SIZE: environment.world_size,
        REPLACE: environment.replacements,
    }
    assignments = [f"{name}={value}" for name, value in variables.items()]
    command = through_proxy([sys.executable, *sys.orig_argv[1:]], os.environ.get(SERVER, ""))
    return ["env", *assignments, *bound_to_parent(command)]


def _process_group(
    environment: Environment,
    device: torch.device,
    timeout_s: float,
    address: tuple[str, int],
    start_timeout_s: float | None = None,
) -> Transport:
    from lockstep.comm.torchdist.process_group_transport import ProcessGroupTransport

    try:
        socket.getaddrinfo(address[0], address[1])
    except OSError as error:
        text = (
            f"MASTER_ADDR={address[0]}: {socket.gethostname()} does not know this host "
            f"({error.strerror}); set MASTER_ADDR to an address of rank 0's host"
        )
        raise alone(EnvironError(text)) from None
    return ProcessGroupTransport(
        _backend(device), address, environment.rank, environment.world_size, timeout_s, device,
        start_timeout_s,
    )  # fmt: skip


def _backend(device: torch.device) -> str:
    """The name of torch's backend that moves tensors of a device.

    Raises:
        EnvironError: this build of torch has none.
    """
    import torch.distributed as dist

    name = dist.Backend.default_device_backend_map.get(device.type)
    if name is None or (name == "nccl" and not dist.is_nccl_available()):
        wanted = "NCCL" if device.type == "cuda" else f"backend for {device.type}"
        raise alone(
            EnvironError(
                f"torch {torch.__version__} has no {wanted}, by which ranks on {device.type} "
                "exchange tensors; install a build of torch that has it, start one rank, or set "
                "device=cpu"
            )
        )
    return name
