"""Sums of gradients over ranks on several hosts, flat and host by host; times and bytes.

For ranks on the hosts of a laboratory. Rank 0 writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.transport import Transport
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.hosts import Hosts, meet, meet_hosts
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.reduction import OrderedReduction, Ways

NUM_SCALARS, NUM_HEADER = 4, 16
BUCKET_BYTES = 8 << 20
_INTERFACE = "eth0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", required=True)
    parser.add_argument("--microbatches", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=5, help="of each way, in turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="about, for each repeat")
    parser.add_argument("--out", type=Path, required=True, help="file that rank 0 writes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = open_transport(detect(os.environ), torch.device("cpu"), 120.0)
    hosts = meet_hosts(transport, [range(transport.size)], meet(transport))
    found = [
        {"parameters": numel, "microbatches": num}
        | measure(transport, hosts, numel, num, args.repeats, args.seconds)
        for numel in args.parameters
        for num in args.microbatches
    ]
    if transport.rank == 0:
        args.out.write_text(json.dumps(found), encoding="utf-8")
    transport.close()


def measure(
    transport: Transport, hosts: Hosts | str, numel: int, num: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """Of each way, seconds of a sum in each repeat, bytes between hosts of one, and its bits."""
    ways = {"flat": "", "hierarchical": hosts} if isinstance(hosts, Hosts) else {"flat": hosts}
    made = {name: laid_out(transport, way, numel, num) for name, way in ways.items()}
    found: dict[str, Any] = {name: {"seconds": [], "bytes": []} for name in ways}
    for reduction in made.values():
        repeated(transport, reduction, 2)
    guess, _ = repeated(transport, made["flat"], 1)
    [count, *_] = transport.gather_json(max(1, min(200, math.ceil(seconds / guess))))
    for _ in range(repeats):
        for name, reduction in made.items():
            spent, moved = repeated(transport, reduction, count)
            found[name]["seconds"].append(spent)
            found[name]["bytes"].append(moved)
    for name, reduction in made.items():
        add(transport, reduction, numel, num)
        reduction.reduce()
        found[name]["sum"] = float(reduction.total.segments[0].double().sum())
    return found


def laid_out(transport: Transport, hosts: Hosts | str, numel: int, num: int) -> OrderedReduction:
    """The ordered reduction of a gradient of float32, as the engine makes it."""
    length = -(-numel // BLOCK) * BLOCK
    made = OrderedReduction(
        transport,
        Leaves(
            [Segment(torch.float32, length)],
            [[(0, torch.Size([length]))]],
            NUM_SCALARS,
            num,
            torch.device("cpu"),
        ),
        Mesh.of(num, transport.size).microbatches,
        num_header=NUM_HEADER,
        bucket_bytes=BUCKET_BYTES,
        ways=Ways(shares_memory=True, is_one_host=False, hosts=hosts, is_measured=False),
    )
    made.header.zero_()
    add(transport, made, numel, num)
    return made


def add(transport: Transport, reduction: OrderedReduction, numel: int, num: int) -> None:
    """Add this rank's microbatches."""
    length = -(-numel // BLOCK) * BLOCK
    reduction.restart()
    for leaf in range(*Mesh.of(num, transport.size).microbatches[transport.rank]):
        values = torch.arange(length, dtype=torch.float32).sin_().add_(leaf)
        reduction.fold.add([values], torch.zeros(NUM_SCALARS, dtype=torch.float64))


def repeated(transport: Transport, reduction: OrderedReduction, count: int) -> tuple[float, float]:
    """Seconds that one of `count` sums takes, on the slowest rank, and bytes between hosts."""
    transport.barrier()
    before, start = sent_bytes(), time.perf_counter()
    for _ in range(count):
        reduction.reduce()
    spent = time.perf_counter() - start
    transport.barrier()
    everyone = transport.gather_json([spent, sent_bytes() - before, local_rank() == 0])
    moved = sum(num_bytes for _, num_bytes, is_first in everyone if is_first)
    return max(spent for spent, _, _ in everyone) / count, moved / count


def local_rank() -> int:
    return detect(os.environ).local_rank


def sent_bytes() -> int:
    """Bytes that this host has sent by its interface."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    [own] = [line for line in lines if line.strip().startswith(f"{_INTERFACE}:")]
    return int(own.partition(":")[2].split()[8])


if __name__ == "__main__":
    main()
