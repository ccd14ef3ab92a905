"""Peer: `nn.Embedding(sparse=True)` under DistributedDataParallel on gloo; started by `tables.py`.

Prints one JSON line on rank 0: seconds of each step, and of a message of a few bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

from table_steps import BATCH, CLASSES, DIM, WARMUP, batches


class Model(nn.Module):
    """A row, and a linear layer."""

    def __init__(self, num_rows: int, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, DIM, sparse=is_sparse)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, classes]."""
        logits: Tensor = self.head(self.table(ids))
        return logits


def messages(count: int) -> list[float]:
    """Seconds of collectives of a few bytes: what no step that has one can do without."""
    own, everyone = torch.zeros(8), torch.zeros(8 * dist.get_world_size())
    spent = []
    for _ in range(count):
        started = perf_counter()
        dist.all_gather_into_tensor(everyone, own)
        spent.append(perf_counter() - started)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dense", action="store_true", help="sparse=False")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Model(args.rows, not args.dense))
    parameters = [model.module.table.parameters(), model.module.head.parameters()]
    optimizers = [torch.optim.SGD(parameters[0], lr=0.1), torch.optim.AdamW(parameters[1], lr=1e-3)]
    steps = WARMUP + args.steps
    ids, classes = batches(args.rows, steps)
    own = BATCH // size
    spent = []
    for step in range(steps):
        first = step * BATCH + rank * own
        part = slice(first, first + own)
        dist.barrier()
        started = perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(ids[part]), classes[part]).backward()
        for optimizer in optimizers:
            optimizer.step()
        spent.append(perf_counter() - started)
    found = {"step_s": spent[WARMUP:], "message_s": messages(args.steps)}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
