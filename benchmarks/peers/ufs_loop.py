"""Peer: hand-written loops that train the sea-ice emulator, from tensors or with a DataLoader.

The recipe's own rows and network, so that only the loop differs. Started by torchrun as several
ranks, it trains with DistributedDataParallel over gloo, or, with `--apart`, a model on each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import adam, arguments, leave, report, world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.recipes.ufs.config import UfsConfig
from lockstep.recipes.ufs.task import Ufs


def main() -> None:
    args = arguments(__doc__, "--loader", "--apart")
    torch.manual_seed(0)
    task = Ufs(UfsConfig(mask_mode="both", squash=False))
    dataset = task.dataset("train")
    assert dataset is not None
    model: nn.Module = task.build_model()
    together = world()[1] > 1 and not args.apart
    if together:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adam(model, args)
    batch = args.batch or 1000
    data = loaded(dataset, batch, together) if args.loader else gathered(dataset, batch)

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    report("ufs", args, batch, step, dist.barrier if together else lambda: None)
    leave()


def gathered(dataset: TensorDataset, batch: int) -> Iterator[tuple[Tensor, ...]]:
    """Endless shuffled batches, gathered from tensors."""
    rank, size = world()
    tensors = [tensor[rank::size].contiguous() for tensor in dataset.tensors]
    while True:
        for rows in torch.randperm(len(tensors[0])).split(batch):
            if len(rows) == batch:
                yield tuple(tensor[rows] for tensor in tensors)


def loaded(dataset: TensorDataset, batch: int, together: bool) -> Iterator[tuple[Tensor, ...]]:
    """Endless shuffled batches of a DataLoader, as most scripts make it."""
    sampler = DistributedSampler(dataset) if together else None
    loader = DataLoader(dataset, batch, shuffle=not together, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


if __name__ == "__main__":
    main()
