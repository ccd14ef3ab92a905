"""Small all-gathers in memory that ranks share; a JSON line from each rank.

An argument: a rank that ends, by SIGKILL, before one of its messages; -1 is none.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import torch

from lockstep.comm.mailbox import CAPACITY
from lockstep.comm.transport import GroupBroken, offsets
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport

NUM_CALLS, LAST = 2000, 1234

transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)
rank, size, dying = transport.rank, transport.size, int(sys.argv[1])
transport.share_memory()
transport.share_memory()
why = transport.why_messages
generator = random.Random(7)  # what is said is the same on all ranks
wrong, took = [], 0.0
try:
    for call in range(NUM_CALLS):
        if (rank, call) == (dying, LAST):
            os.kill(os.getpid(), signal.SIGKILL)
        kind = generator.choice([torch.uint8, torch.int16, torch.int32, torch.float64])
        most = CAPACITY // kind.itemsize // size if call % 50 == 0 else 300
        counts = [generator.randrange(most + 1) for _ in range(size)]
        if call % 3 == 0:
            counts = [counts[0]] * size
        expected = [torch.full((n,), (call + r) % 251, dtype=kind) for r, n in enumerate(counts)]
        out = torch.zeros(sum(counts), dtype=kind)
        mine = expected[rank].clone()
        if call % 2:
            own = out[offsets(counts)[rank] :][: counts[rank]]
            own.copy_(mine)
            mine = own
        if generator.random() < 0.1 and rank == generator.randrange(size):
            time.sleep(0.001)
        transport.all_gather(mine, out, counts)
        if not torch.equal(out, torch.cat(expected)):
            wrong.append(call)
except GroupBroken:
    started = time.perf_counter()
    transport.regroup()
    took = time.perf_counter() - started
    assert transport.why_messages is None
    transport.share_memory()
    wrong += [said for said in transport.gather_json([]) if said]
told = transport.gather_json([call, transport.size])
found = {"rank": rank, "why": why, "wrong": wrong, "told": told, "regroup_s": took}
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
transport.barrier()
transport.close()
