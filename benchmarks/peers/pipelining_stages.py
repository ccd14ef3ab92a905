"""The blocks of `staged_blocks.py` with torch.distributed.pipelining over gloo, under torchrun.

Prints the same line of JSON. One rank alone adds up gradients of microbatches, as users do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[1]))
from sharded_layers import digest, timed
from staged_blocks import LR, arguments, blocks, inputs


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    """The loss; `target` is what the schedule insists on."""
    return y.square().mean()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    every, x = blocks(args), inputs(args)
    share = len(every) // world_size
    own = nn.Sequential(*every[rank * share : (rank + 1) * share])
    optimizer = torch.optim.SGD(own.parameters(), LR, fused=True)
    schedule = scheduled(args, own) if world_size > 1 else None

    def work() -> None:
        optimizer.zero_grad()
        if schedule is None:
            for part in x.chunk(args.microbatches):
                (mean_square(own(part), part) / args.microbatches).backward()
        elif rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=x, return_outputs=False)
        optimizer.step()

    seconds = timed(work, dist.barrier, args.repeats)
    mine = [digest(torch.cat([p.flatten() for p in block.parameters()])) for block in own]
    everyone: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        together = hashlib.sha256(json.dumps([*chain(*everyone)]).encode()).hexdigest()
        print(json.dumps({"seconds": seconds, "digest": together[:16]}), flush=True)
    dist.destroy_process_group()


def scheduled(args: argparse.Namespace, own: nn.Module) -> Schedule1F1B:
    """This rank's stage in its schedule; it finds shapes in its first step."""
    stage = PipelineStage(own, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return Schedule1F1B(stage, args.microbatches, mean_square)


if __name__ == "__main__":
    main()
