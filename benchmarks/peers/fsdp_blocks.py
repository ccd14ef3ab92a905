"""The blocks of `sliced_blocks.py` with torch's FSDP2 over gloo, under torchrun.

Prints the same line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from sliced_blocks import LR, WARMUP, arguments, blocks, greatest_peak, inputs


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*blocks(args))
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    own = args.microbatches // world_size
    batches = inputs(args).chunk(args.microbatches)[rank * own : (rank + 1) * own]
    seconds = []
    for _ in range(WARMUP + args.repeats):
        dist.barrier()
        begun = perf_counter()
        optimizer.zero_grad()
        for x in batches:
            # FSDP divides by the number of ranks.
            (model(x).square().mean() * world_size / args.microbatches).backward()
        optimizer.step()
        dist.barrier()
        seconds.append(perf_counter() - begun)
    peak = greatest_peak(rank, world_size)
    sha = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor()  # a collective
        sha.update(whole.detach().numpy().tobytes())
    if rank == 0:
        found = {"seconds": seconds[WARMUP:], "peak_bytes": peak, "digest": sha.hexdigest()[:16]}
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # FSDP's threads may abort the process at its end


if __name__ == "__main__":
    main()
