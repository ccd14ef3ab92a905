"""All-reduce through `torch.distributed`: Lockstep's MPI backend under mpirun, gloo under torchrun.

Prints one JSON line on rank 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("mpi4py", "gloo"), required=True)
    parser.add_argument("--repeats", type=int, default=7, help="the median is printed")
    parser.add_argument("--seconds", type=float, default=0.5, help="about, for each repeat")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.backend == "mpi4py":
        from lockstep.comm.backend import init_process_group

        init_process_group()
    else:
        dist.init_process_group("gloo")
    sizes = (1 << 10, 1 << 24)
    latency_s = {str(size): measure(size, args.repeats, args.seconds) for size in sizes}
    if dist.get_rank() == 0:
        result = {"name": args.backend, "world_size": dist.get_world_size(), "latency_s": latency_s}
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def measure(num_bytes: int, repeats: int, seconds: float) -> float:
    """Seconds one all-reduce takes, the median of several repeats on rank 0."""
    tensor = torch.zeros(num_bytes // 4)
    times(tensor, 10)
    guess = torch.tensor(times(tensor, 10))
    dist.broadcast(guess, src=0)  # else ranks would differ in how often they go round
    count = max(3, int(seconds / float(guess)))
    return statistics.median(times(tensor, count) for _ in range(repeats))


def times(tensor: torch.Tensor, count: int) -> float:
    """Seconds one of `count` all-reduces takes."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()
