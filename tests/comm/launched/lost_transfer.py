"""Two ranks in one process; the connections between them close in the midst of a transfer."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lockstep.comm.torchdist.elastic_transport import ElasticTransport
from lockstep.comm.torchdist.waiting import Connections, LeftBehind

HOST = "127.0.0.1"


class Bereaved:
    """A supervision that knows of a loss."""

    def is_lost(self) -> bool:
        return True

    def leave(self) -> None:
        pass


def transport(group: dist.ProcessGroup, rank: int) -> ElasticTransport:
    made = ElasticTransport.__new__(ElasticTransport)
    made.__dict__.update(name="gloo", group=group, rank=rank, _supervision=Bereaved())
    made.__dict__.update(_connections=Connections(HOST))
    made.__dict__.update(_subgroups=[], _builders=[], _left_behind=[], under_way=[])
    return made


def connected() -> list[dist.ProcessGroup]:
    store, groups = HashStore(), [None, None]

    def connect(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=600)
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

    threads = [threading.Thread(target=connect, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def main() -> None:
    connections = Connections(HOST)
    connections.begin()
    groups = connected()
    connections.end()
    transports = [transport(group, rank) for rank, group in enumerate(groups)]
    options = dist.BroadcastOptions()
    options.rootRank = 0
    sent, received = torch.ones(200_000_000), torch.zeros(200_000_000)
    works = [
        group.broadcast([tensor], options)
        for group, tensor in zip(groups, (sent, received), strict=True)
    ]
    while not received[0]:  # gloo forgets a transfer of which a part has come, and no other
        time.sleep(0.001)
    connections.shut_down()
    time.sleep(0.5)
    print("forgotten by gloo:", sum(not work.is_completed() for work in works))
    groups.clear()
    for made, work in zip(transports, works, strict=True):
        try:
            made._finish(work)
            print("finished")
        except LeftBehind:
            print("given up")
        except RuntimeError:
            print("failed")
        made.close()


main()
