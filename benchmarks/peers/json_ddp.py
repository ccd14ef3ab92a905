"""Peer: DDP on gloo, each rank with its files by `datasets.distributed.split_dataset_by_node`."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from harness import leave
from json_lines import (
    BATCH,
    LINES,
    LR,
    NUM_FILES,
    bytes_read,
    classifier,
    step_s,
    stream,
    tensors,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--microbatches", type=int, default=1, help="of all ranks, accumulated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    own = split_dataset_by_node(stream(args.folder), rank, size)
    each = max(1, args.microbatches // size)
    loader = DataLoader(own, batch_size=BATCH // size // each, collate_fn=tensors, drop_last=True)
    ends = []
    for number, (x, y) in enumerate(loader, 1):
        is_last = number % each == 0
        with nullcontext() if is_last else model.no_sync():
            (nn.functional.cross_entropy(model(x), y) / each).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ends.append(time.perf_counter())
    assert len(ends) == NUM_FILES * LINES // BATCH
    if rank == 0:
        print(json.dumps({"step_s": step_s(ends), "bytes": bytes_read()}), flush=True)
    leave()


if __name__ == "__main__":
    main()
