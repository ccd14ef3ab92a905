"""Sums of gradients in memory that ranks share, and by messages; a JSON line from each rank.

An argument: a rank that may write no large files, and so has no memory to share; -1 is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from pathlib import Path

import torch

from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import split
from lockstep.parallel.reduction import OrderedReduction, Ways

NUMEL = (301 * BLOCK, 77 * BLOCK)
NUM_MICROBATCHES = 5
NUM_LAYOUTS = 21

transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)
rank, traffic = transport.rank, transport.traffic
ranges = split(NUM_MICROBATCHES, transport.size)
if rank == int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


def laid_out(shares_memory):
    return OrderedReduction(
        transport,
        Leaves(
            [Segment(torch.float32, NUMEL[0]), Segment(torch.float64, NUMEL[1])],
            [[(0, torch.Size([numel]))] for numel in NUMEL],
            2,
            NUM_MICROBATCHES,
            torch.device("cpu"),
        ),
        ranges,
        num_header=1,
        bucket_bytes=1 << 20,
        ways=Ways(shares_memory=shares_memory),
    )


def digest(reduction, step):
    """SHA-256 of a step's sum."""
    reduction.restart()
    for microbatch in range(*ranges[rank]):
        generator = torch.Generator().manual_seed(step * NUM_MICROBATCHES + microbatch)
        leaf = [
            torch.randn(numel, generator=generator, dtype=segment.dtype)
            for numel, segment in zip(NUMEL, reduction.total.segments, strict=True)
        ]
        scalars = torch.tensor([microbatch, 1.0], dtype=torch.float64)
        reduction.fold.add(leaf, scalars)
    reduction.reduce()
    row = reduction.total
    return hashlib.sha256(
        b"".join(t.numpy().tobytes() for t in (*row.segments, row.scalars))
    ).hexdigest()


def counted(reduction):
    """Calls, and bytes sent and received, for a sum."""
    before = traffic.num_calls, traffic.sent_bytes, traffic.received_bytes
    digest(reduction, 0)
    after = traffic.num_calls, traffic.sent_bytes, traffic.received_bytes
    return [b - a for a, b in zip(before, after, strict=True)]


def num_kept():
    """Mappings of memory to share, and descriptors, of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:lockstep")
    return [maps, len(os.listdir("/proc/self/fd"))]


found = {"rank": rank, "digests": [], "kept": []}
for shares_memory in (True, False):
    reduction = laid_out(shares_memory)
    found["digests"].append([digest(reduction, step) for step in range(3)])
    found["counts"] = [*found.get("counts", []), counted(reduction)]
    found["why"] = [*found.get("why", []), reduction.why_messages]
for number in range(NUM_LAYOUTS):
    reduction = laid_out(True)
    if number % 3:  # some are never used
        digest(reduction, 0)
    found["kept"].append(num_kept())
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
transport.barrier()
transport.close()
