"""Sums of gradients among the ranks of a host: in memory that they share, by messages, and MPI's.

For mpirun. Prints one JSON line on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from lockstep.comm.transport import Transport
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.reduction import OrderedReduction, Ways

NUM_SCALARS, NUM_HEADER = 4, 8
BUCKET_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20, 3_200_000, 50_000_000])
    parser.add_argument("--repeats", type=int, default=7, help="the median is printed")
    parser.add_argument("--seconds", type=float, default=0.3, help="about, for each repeat")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)
    found = {str(n): measure(transport, n, args.repeats, args.seconds) for n in args.sizes}
    if transport.rank == 0:
        result = {"name": "exchange", "world_size": transport.size, "exchange_s": found}
        print(json.dumps(result), flush=True)
    transport.close()


def measure(transport: Transport, num_bytes: int, repeats: int, seconds: float) -> dict[str, float]:
    """Seconds that a sum takes each way, the median of several repeats in turn, on rank 0."""
    ways = {
        "shared memory": ordered_sum(transport, num_bytes, shares_memory=True),
        "messages": ordered_sum(transport, num_bytes, shares_memory=False),
        "MPI_Allreduce": mpi_sum(num_bytes),
    }
    for way in ways.values():
        times(transport, way, 3)
    [guess, *_] = transport.gather_json(times(transport, ways["messages"], 3))
    count = max(3, int(seconds / guess))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(times(transport, way, count))
    return {name: statistics.median(spent) for name, spent in found.items()}


def ordered_sum(transport: Transport, num_bytes: int, shares_memory: bool) -> Callable[[], None]:
    """What sums a gradient of float32 as the engine does, a node on each rank."""
    numel = -(-num_bytes // (4 * BLOCK)) * BLOCK
    size = transport.size
    reduction = OrderedReduction(
        transport,
        Leaves(
            [Segment(torch.float32, numel)],
            [[(0, torch.Size([numel]))]],
            NUM_SCALARS,
            size,
            torch.device("cpu"),
        ),
        Mesh.of(size, size).microbatches,
        num_header=NUM_HEADER,
        bucket_bytes=BUCKET_BYTES,
        ways=Ways(shares_memory=shares_memory),
    )
    reduction.header.zero_()
    # Zeros stay what they are however often they are added up.
    scalars = torch.zeros(NUM_SCALARS, dtype=torch.float64)
    reduction.fold.add([torch.zeros(numel)], scalars)
    return reduction.reduce


def mpi_sum(num_bytes: int) -> Callable[[], None]:
    """What MPI offers for it, whose order of additions is its own business."""
    from mpi4py import MPI

    gradient = torch.zeros(num_bytes // 4)
    memory = MPI.buffer.fromaddress(gradient.data_ptr(), gradient.nbytes)

    def call() -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, [memory, MPI.FLOAT])
        assert gradient[0] == 0

    return call


def times(transport: Transport, call: Callable[[], None], count: int) -> float:
    """Seconds that one of `count` calls takes."""
    transport.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()
