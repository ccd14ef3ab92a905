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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

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
    num_stages = world_size * args.interleave
    share = len(every) // num_stages
    stages = {
        number: nn.Sequential(*every[number * share : (number + 1) * share])
        for number in range(rank, num_stages, world_size)
    }
    own = nn.Sequential(*stages.values())
    optimizer = torch.optim.SGD(own.parameters(), LR, fused=True)
    schedule = scheduled(args, stages, num_stages) if world_size > 1 else None

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
    mine = {
        number: [digest(torch.cat([p.flatten() for p in block.parameters()])) for block in blocks]
        for number, blocks in stages.items()
    }
    everyone: list[dict[int, list[str]]] = [{} for _ in range(world_size)]
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        found = {number: of_stage for theirs in everyone for number, of_stage in theirs.items()}
        in_order = [*chain(*(found[number] for number in range(num_stages)))]
        together = hashlib.sha256(json.dumps(in_order).encode()).hexdigest()
        print(json.dumps({"seconds": seconds, "digest": together[:16]}), flush=True)
    dist.destroy_process_group()


def scheduled(
    args: argparse.Namespace, own: dict[int, nn.Sequential], num_stages: int
) -> Schedule1F1B | ScheduleInterleaved1F1B:
    """This rank's stages in their schedule; it finds shapes in its first step."""
    stages = [
        PipelineStage(m, number, num_stages, torch.device("cpu")) for number, m in own.items()
    ]
    if len(stages) == 1:
        return Schedule1F1B(stages[0], args.microbatches, mean_square)
    return ScheduleInterleaved1F1B(stages, args.microbatches, mean_square)


if __name__ == "__main__":
    main()
