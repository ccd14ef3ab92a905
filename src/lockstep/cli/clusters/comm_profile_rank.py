"""A rank that measures communication, started by the command or by any other launcher.

    mpirun -n 2 python -m lockstep.cli.clusters.comm_profile_rank '{"sizes": [1024], "seconds": 5}'

Rank 0 prints the profile as a line of JSON; an error is a line that begins with `error: `.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep.cli.clusters.comm_profile_calls import grouped, joined, joined_torch, open_torch
from lockstep.cli.clusters.comm_profile_profiler import (
    Facts,
    Profiler,
    facts_of,
    hosts_of,
    versions,
    warnings_of,
)
from lockstep.comm.torchdist.process_group_transport import ProcessGroupTransport
from lockstep.comm.transport import Transport
from lockstep.config.parsing import as_type, parse_object
from lockstep.engine.runtime import on_first
from lockstep.errors import ConfigError, LaunchError, LockstepError, RankFailure
from lockstep.launching.api import find_device
from lockstep.launching.rank.environment import Environment, detect
from lockstep.launching.rank.join import open_transport
from lockstep.launching.rank.process import num_threads, tell
from lockstep.planning.operations import OPERATIONS, size_text
from lockstep.planning.profile import FORMAT, VERSION, Measurement, Profile

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others in one collective, where a transport has a timeout."""


@dataclass(frozen=True)
class Request:
    """The measurements to make.

    Attributes:
        sizes: in bytes, ascending.
        seconds: time to take, about.
        device: as the key of a config.
        with_torch: whether to measure `torch.distributed` too.
    """

    sizes: tuple[int, ...]
    seconds: float
    device: str = "auto"
    with_torch: bool = True


def main(argv: list[str]) -> int:
    """Measure, and print the profile on rank 0; the exit code."""
    try:
        environment = detect(os.environ)
        profile = measured(as_type(Request, parse_object(argv[0])), environment)
    except LockstepError as error:
        tell(error)
        return error.exit_code
    if environment.rank == 0:
        sys.stdout.write(json.dumps(asdict(profile), allow_nan=False) + "\n")
        sys.stdout.flush()
    return 0


def command(request: Request) -> list[str]:
    """The command with which a rank runs this module."""
    module = "lockstep.cli.clusters.comm_profile_rank"
    return [sys.executable, "-m", module, json.dumps(asdict(request))]


def measured(
    request: Request, environment: Environment, check: Callable[[], object] = lambda: None
) -> Profile:
    """The profile, on all ranks; each of them calls this.

    A rank that fails alone ends the others too, if its transport can do that.

    Args:
        request: measurements to make.
        environment: place of this process among the ranks.
        check: called on rank 0 before anything is measured; all ranks raise its error.

    Raises:
        LockstepError: there is a single rank, no such device, or too little memory.
    """
    if environment.world_size < 2:
        raise LaunchError("comm-profile: one rank has nobody to talk to; start 2 or more")
    last = environment.local_world_size - 1
    find_device(request.device, replace(environment, local_rank=last))
    device = find_device(request.device, environment)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    with num_threads(1, environment):
        transport = open_transport(environment, device, TIMEOUT_S)
        transport.share_memory()
        measuring = Measuring(request, environment.launcher, transport, device)
        try:
            on_first(transport, check)
            facts = facts_of(socket.gethostname(), environment, device)
            opened = partial(open_torch, transport, environment, TIMEOUT_S)
            profile = measuring.profile(facts, opened if request.with_torch else None)
        except LockstepError:  # all ranks raise it
            _close(transport)
            raise
        except Exception as error:
            _abort(transport, measuring.doing, error)
        _close(transport)
    return profile


class Measuring:
    """A measurement among the ranks of a transport.

    Args:
        request: measurements to make.
        launcher: name of the launcher that started the ranks.
        transport: transport of all ranks.
        device: device that tensors are on.
    """

    def __init__(
        self, request: Request, launcher: str, transport: Transport, device: torch.device
    ) -> None:
        self._request, self._launcher = request, launcher
        self._transport, self._device = transport, device
        self._profiler: Profiler | None = None

    @property
    def doing(self) -> str:
        """What is being measured, for messages."""
        return self._profiler.doing if self._profiler else "the start"

    def profile(self, own: Facts, open_torch: Callable[[], str] | None) -> Profile:
        """The profile; every rank calls this.

        Args:
            own: facts about the host of this rank.
            open_torch: function that makes the default process group of `torch.distributed` and
                returns the name of its backend; None to leave that layer out.

        Raises:
            ConfigError: the smallest size does not fit into some rank's memory; on all ranks.
        """
        began, transport = time.time(), self._transport
        facts = [as_type(Facts, row) for row in transport.gather_json(asdict(own))]
        memory_bytes = min(each.memory_bytes for each in facts)
        _check_memory(self._request.sizes[0], memory_bytes)
        groups = grouped([each.host for each in facts])
        self._profiler = Profiler(
            transport, self._device, self._request.sizes, self._request.seconds, memory_bytes,
            len(groups),
        )  # fmt: skip
        backend = open_torch() if open_torch else ""
        found: list[Measurement] = []
        for group in groups:
            torch_group = joined_torch(group, transport.rank) if open_torch else None
            found += self._profiler.measure(group, joined(transport, group), torch_group)
        hosts = hosts_of(facts)
        return Profile(
            format=FORMAT,
            version=VERSION,
            measured_at=began,
            date=datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="seconds"),
            launcher=self._launcher,
            transport=transport.name,
            torch_backend=backend,
            device=self._device.type,
            num_ranks=transport.size,
            hosts=hosts,
            versions=versions(transport.name),
            seconds=time.time() - began,
            warnings=(*warnings_of(hosts), *self._profiler.unmeasured),
            measurements=tuple(found),
        )


def _check_memory(num_bytes: int, memory_bytes: int) -> None:
    least = num_bytes * min(one.copies for one in OPERATIONS.values())
    if least > memory_bytes:
        raise ConfigError(
            f"--sizes: {size_text(num_bytes)} takes {least:,} bytes of memory on each rank, and "
            f"there are {memory_bytes:,}; begin with a smaller size, or start fewer ranks"
        )


def _close(transport: Transport) -> None:
    """Leave all groups in order."""
    is_own = isinstance(transport, ProcessGroupTransport)
    if dist.is_initialized() and not is_own:  # that one destroys the default group itself
        dist.destroy_process_group()
    transport.close()


def _abort(transport: Transport, doing: str, error: Exception) -> NoReturn:
    """Print what has failed, and end all ranks."""
    why = " ".join(str(error).split()) or type(error).__name__
    print(
        f"error: a rank was lost or has failed while {doing} was measured ({why})",
        file=sys.stderr,
        flush=True,
    )
    transport.abort(RankFailure.exit_code)
    raise AssertionError("is dead")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
