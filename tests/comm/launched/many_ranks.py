"""All-gathers and all-to-alls as among many ranks; then the last rank but one dies in one.

Each survivor prints a JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import accumulate

import torch

from lockstep.comm import ahead
from lockstep.comm.mpi import transport as over_mpi
from lockstep.comm.torchdist import process_group_transport as over_gloo
from lockstep.comm.transport import GroupBroken
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport

for module in (ahead, over_mpi, over_gloo):
    module.FEW_RANKS = 1  # so that a few count as many
transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)


def parts(counts, ranks):
    pairs = zip(counts, ranks, strict=True)
    return torch.cat([torch.full((num,), rank, dtype=torch.int16) for num, rank in pairs])


def gather(longest):
    size, own = transport.size, transport.rank
    for counts in ([longest] * size, [(7 * r) % 4 * longest for r in range(size)]):
        out, everyone = parts([sum(counts)], [-1]), parts(counts, range(size))
        before = transport.traffic.received_bytes
        transport.all_gather(parts([counts[own]], [own]), out, counts)
        assert torch.equal(out, everyone)
        assert transport.traffic.received_bytes - before == 2 * (sum(counts) - counts[own])
        # In place, as slices of parameters are.
        starts = [0, *accumulate(counts)]
        out[: starts[own]] = out[starts[own + 1] :] = -1
        transport.all_gather(out[starts[own] :][: counts[own]], out, counts)
        assert torch.equal(out, everyone)


def check():
    size, own = transport.size, transport.rank
    gather(1)
    gather(40_000)
    to, of = ([(own + r) % 3 for r in range(size)] for _ in range(2))
    received = parts([sum(of)], [-1])
    starts = [0, *accumulate(to)][:-1]
    transport.all_to_all(parts(to, [own] * size), to, starts, received, of)
    assert torch.equal(received, parts(of, range(size)))
    some = list(range(0, size, 2))
    counts = [r + 1 for r in some]
    for ahead.FEW_RANKS in (100, 1):  # at once, and in rounds
        there = parts(counts, [r if r == own else -1 for r in some])
        transport.gather_among(there if own in some else there[:0], some, counts)
        if own in some:
            assert torch.equal(there, parts(counts, some))
    transport.barrier()


check()
dies = transport.size - 2
if transport.rank == dies:
    gather(40_000)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        gather(40_000)
except GroupBroken:
    transport.regroup()
check()
sys.stdout.write(json.dumps({"rank": transport.rank, "size": transport.size}) + "\n")
sys.stdout.flush()
transport.close()
