"""What two ranks count of each kind of call; prints a JSON line on each of them."""

from __future__ import annotations

import json
import os
import sys

import torch

from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport

transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)
rank, traffic = transport.rank, transport.traffic
found: dict[str, tuple[int, int, int]] = {}


def counted(name, call):
    before = traffic.num_calls, traffic.sent_bytes, traffic.received_bytes
    call()
    after = traffic.num_calls, traffic.sent_bytes, traffic.received_bytes
    found[name] = tuple(b - a for a, b in zip(before, after, strict=True))


def message():
    if rank == 0:
        transport.send(torch.ones(7), 1).wait()
    else:
        transport.receive(torch.zeros(7), 0)


counted("even", lambda: transport.all_gather(torch.ones(3), torch.zeros(6), [3, 3]))
counted("uneven", lambda: transport.all_gather(torch.ones(rank + 1), torch.zeros(3), [1, 2]))
received = [rank + 1] * 2
counted(
    "all_to_all",
    lambda: transport.all_to_all(
        torch.ones(3), [1, 2], [0, 1], torch.zeros(sum(received)), received
    ),
)


def started():
    """An all-to-all that goes on until it is waited for; each rank sends the other one 1 or 2."""
    sent, there = torch.arange(3.0), torch.full((sum(received),), -1.0)
    under_way = transport.start(sent, [1, 2], [0, 1], there, received)
    assert transport.under_way == [under_way]
    under_way.wait()
    assert not transport.under_way
    kept = [-1.0] * (rank + 1)  # this rank's part is not copied
    assert there.tolist() == ([*kept, 0.0] if rank == 0 else [1.0, 2.0, *kept]), there


counted("started", started)
counted("broadcast", lambda: transport.broadcast(torch.ones(5), 1))
counted("message", message)
counted("barrier", transport.barrier)
counted("agree", transport.agree)
part = transport.subgroup([[0, 1]])
counted("subgroup", lambda: part.all_gather(torch.ones(3), torch.zeros(6), [3, 3]))
sys.stdout.write(json.dumps({"rank": rank, "found": found}) + "\n")
sys.stdout.flush()
transport.barrier()
part.close()
transport.close()
