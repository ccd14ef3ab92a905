"""Plain loops that time messages and collectives, without anything of Lockstep.

Over MPI with mpi4py and NumPy arrays, as the OSU micro-benchmarks do it: `osu_latency` (ping-pong,
half of there and back) and `osu_allreduce` (a barrier before each call). Over gloo with
`torch.distributed`. A call takes as long as its slowest rank; rank 0 prints medians as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], object]
Seconds = dict[str, dict[str, float]]

_WARM_UPS = 5
_LEAST, _MOST = 5, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--over", choices=("mpi", "gloo"), required=True)
    parser.add_argument("--sizes", required=True, help="bytes, with commas between them")
    parser.add_argument("--seconds", type=float, default=0.3, help="about, for each size")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    rank, found = (over_mpi if args.over == "mpi" else over_gloo)(sizes, args.seconds)
    if rank == 0:
        print(json.dumps({"name": f"loops over {args.over}", "median_s": found}), flush=True)


def over_mpi(sizes: list[int], seconds: float) -> tuple[int, Seconds]:
    """The rank, and by operation and size the median time over MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, other = world.rank, 1 - world.rank
    found: Seconds = {}

    def slowest(own: np.ndarray[Any, Any]) -> list[float]:
        everyone = np.empty_like(own)
        world.Allreduce(own, everyone, op=MPI.MAX)
        return [float(each) for each in everyone]

    for size in sizes:
        one, two = np.ones(size // 4, dtype=np.float32), np.ones(size // 4, dtype=np.float32)
        part = one[: size // 4 // world.size]

        def there_and_back(one: Any = one) -> None:
            if rank == 0:
                world.Send(one, dest=other)
                world.Recv(one, source=other)
            elif rank == 1:
                world.Recv(one, source=other)
                world.Send(one, dest=other)

        calls: dict[str, Call] = {
            "all_reduce": lambda one=one, two=two: world.Allreduce(one, two),
            "all_gather": lambda part=part, two=two: world.Allgather(part, two),
            "broadcast": lambda one=one: world.Bcast(one),
        }
        for name, call in calls.items():
            times = timed(call, world.Barrier, slowest, seconds)
            found.setdefault(name, {})[str(size)] = statistics.median(times)
        times = timed(there_and_back, lambda: None, lambda own: slowest(own * (rank == 0)), seconds)
        found.setdefault("message", {})[str(size)] = statistics.median(times) / 2
    return rank, found


def over_gloo(sizes: list[int], seconds: float) -> tuple[int, Seconds]:
    """The same over gloo, with ranks that torchrun has started."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    # Versions of torch differ in what they call it.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found: Seconds = {}

    def slowest(own: np.ndarray[Any, Any]) -> list[float]:
        times = torch.from_numpy(own.copy())
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return list(map(float, times))

    own_line = torch.ones(1)

    def line() -> None:
        dist.all_reduce(own_line, op=dist.ReduceOp.MAX)

    for size in sizes:
        one, two = torch.zeros(size // 4).add_(0.0), torch.zeros(size // 4).add_(0.0)
        part = one[: size // 4 // dist.get_world_size()].clone()

        def there_and_back(one: Any = one) -> None:
            if rank == 0:
                dist.send(one, other)
                dist.recv(one, other)
            elif rank == 1:
                dist.recv(one, other)
                dist.send(one, other)

        calls: dict[str, Call] = {
            "all_reduce": lambda one=one: dist.all_reduce(one),
            "all_gather": lambda part=part, two=two: gather(two, part),
            "broadcast": lambda one=one: dist.broadcast(one, 0),
        }
        for name, call in calls.items():
            times = timed(call, line, slowest, seconds)
            found.setdefault(name, {})[str(size)] = statistics.median(times)
        times = timed(there_and_back, lambda: None, lambda own: slowest(own * (rank == 0)), seconds)
        found.setdefault("message", {})[str(size)] = statistics.median(times) / 2
    dist.destroy_process_group()
    return rank, found


def timed(
    call: Call,
    line: Call,
    slowest: Callable[[np.ndarray[Any, Any]], list[float]],
    seconds: float,
) -> list[float]:
    """Seconds of calls, for each those of its slowest rank.

    Args:
        call: what is timed.
        line: lets this rank go on when all have come.
        slowest: from this rank's times to the greatest of all ranks'.
        seconds: for all calls, about.
    """
    guess = statistics.median(slowest(repeated(call, line, _WARM_UPS)))
    count = min(max(int(seconds / guess), _LEAST), _MOST)
    return slowest(repeated(call, line, count))


def repeated(call: Call, line: Call, count: int) -> np.ndarray[Any, Any]:
    """Seconds of each of `count` calls on this rank."""
    own = np.zeros(count)
    for number in range(count):
        line()
        before = time.perf_counter()
        call()
        own[number] = time.perf_counter() - before
    return own


if __name__ == "__main__":
    main()
