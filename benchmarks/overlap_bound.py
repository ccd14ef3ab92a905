"""What an exchange that goes on during the last backward pass could save at most.

For ranks on the hosts of a laboratory. Rank 0 writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from host_sums import laid_out
from lockstep.comm.transport import Transport
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.parallel.hosts import meet_hosts
from peers.models import workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--microbatches", type=int, nargs="+", required=True, help="of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="file that rank 0 writes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = open_transport(detect(os.environ), torch.device("cpu"), 300.0)
    found = [
        measure(transport, model, num, args.repeats)
        for model in args.models
        for num in args.microbatches
    ]
    if transport.rank == 0:
        args.out.write_text(json.dumps(found), encoding="utf-8")
    transport.close()


def measure(transport: Transport, name: str, num: int, repeats: int) -> dict[str, Any]:
    """Seconds of the parts of a step: medians of the repeats, on the slowest rank.

    Those of computing are of a core, as it takes on one that does nothing else.
    """
    work = workload(name)
    numel = sum(p.numel() for p in work.model.parameters())
    hosts = meet_hosts(transport, [range(transport.size)])
    reduction = laid_out(transport, hosts, numel, transport.size)
    inputs, targets = work.data(work.batch)
    parts = list(zip(inputs.chunk(num), targets.chunk(num), strict=True))
    reduction.reduce()
    rows = []
    for _ in range(repeats):
        computing = last = 0.0
        for x, y in parts:
            start = time.process_time()
            loss = work.loss(work.model(x), y)
            between = time.process_time()
            loss.backward()
            end = time.process_time()
            computing, last = computing + end - start, end - between
        work.model.zero_grad()
        transport.barrier()
        exchange, busy = timed(reduction.reduce)
        rows.append([computing, last, exchange, busy])
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    everyone = transport.gather_json(medians)
    names = ("computing_s", "last_backward_s", "exchange_s", "exchange_cpu_s")
    slowest = dict(zip(names, map(max, zip(*everyone, strict=True)), strict=True))
    return {"model": name, "parameters": numel, "microbatches": num} | slowest


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, and those of a core that this process uses meanwhile."""
    start, before = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - before


if __name__ == "__main__":
    main()
