"""Peer: DDP on gloo, each rank with its files by `datasets.distributed.split_dataset_by_node`."""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from harness import leave
from json_lines import BATCH, LINES, LR, NUM_FILES, bytes_read, classifier, stream, tensors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    own = split_dataset_by_node(stream(args.folder), rank, size)
    loader = DataLoader(own, batch_size=BATCH // size, collate_fn=tensors, drop_last=True)
    ends = []
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    assert len(ends) == NUM_FILES * LINES // BATCH
    if rank == 0:
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        print(json.dumps({"step_s": step_s, "bytes": bytes_read()}), flush=True)
    leave()


if __name__ == "__main__":
    main()
