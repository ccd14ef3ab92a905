"""Rank 1 of three is killed in the middle of things. Needs `mpirun --with-ft ulfm`.

Argument: `regroup` (the survivors go on in the same processes) or `ddp` (DDP's backward raises
and the survivors end without tidying up). Each survivor prints one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.backend import MpiProcessGroup, init_process_group
from lockstep.comm.mpi.library import MPI


def main() -> None:
    group = init_process_group(timeout=timedelta(seconds=60))
    report = {"regroup": regroup, "ddp": fail_in_ddp}[sys.argv[1]](group, dist.get_rank())
    print(json.dumps(report), flush=True)


def die(rank: int) -> None:
    """Kill rank 1, once all have got this far."""
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def regroup(group: MpiProcessGroup, rank: int) -> dict[str, object]:
    """What a recovery does: revoke all, shrink one, start again."""
    # Rank 2 waits for rank 0 in here, knows nothing of the death and must be released.
    pair = dist.new_group([0, 2])
    die(rank)
    try:
        dist.all_reduce(torch.ones(1000), group=group if rank == 0 else pair)
        raise AssertionError("the collective ended without rank 1")
    except MPI.Exception as error:
        error_class = error.Get_error_class()
    for comm in group.world.communicators():
        comm.Revoke()
    shrunk = group.comm.Shrink()
    assert isinstance(shrunk, MPI.Intracomm)
    dist.destroy_process_group()
    survivors = init_process_group(shrunk)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    report = {
        "was": rank,
        "error": "failed" if error_class == MPI.ERR_PROC_FAILED else "revoked",
        "rank": survivors.rank(),
        "size": survivors.size(),
        "total": total.item(),
    }
    dist.destroy_process_group()
    return report


def fail_in_ddp(group: MpiProcessGroup, rank: int) -> dict[str, object]:
    """DDP's C++ reducer gets the error through a future."""
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    die(rank)
    try:
        model(torch.ones(1, 3)).sum().backward()
        raise AssertionError("the backward pass ended without rank 1")
    except RuntimeError as error:
        named = "MPI_ERR_PROC_FAILED" in str(error) or "MPI_ERR_REVOKED" in str(error)
    return {"was": rank, "named": named}


if __name__ == "__main__":
    main()
