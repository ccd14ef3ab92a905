"""Peer: DistributedDataParallel on gloo, whose loss gathers outputs of all ranks with gradients."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch
import torch.distributed as dist
from harness import leave
from pairs import BATCH, LR, NUM_BATCHES, contrast, encoder, views
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=5, help="the first is not timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(encoder(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    # The rows that Lockstep gives this rank, in the same order.
    own = [data.view(NUM_BATCHES, size, BATCH // size, -1)[:, rank] for data in views()]
    losses, seconds = [], []
    for repeat in range(args.repeats):
        dist.barrier()
        began = time.perf_counter()
        total = 0.0
        for step in range(repeat * args.steps, (repeat + 1) * args.steps):
            one, other = model(torch.cat([data[step % NUM_BATCHES] for data in own])).chunk(2)
            # The mean over ranks of gradients that come from each rank's loss of everything.
            loss = contrast(torch.cat(all_gather(one)), torch.cat(all_gather(other)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item()
        seconds.append((time.perf_counter() - began) / args.steps)
        losses.append(total / args.steps)
    if rank == 0:
        step_s = statistics.median(seconds[1:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        found = {"samples_per_s": BATCH / step_s, "step_s": step_s, "losses": losses}
        print(json.dumps(found | {"peak_bytes": peak}), flush=True)
    leave()


if __name__ == "__main__":
    main()
