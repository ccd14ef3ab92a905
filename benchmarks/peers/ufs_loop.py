"""Peer: hand-written loops that train the sea-ice emulator, from tensors or with a DataLoader.

The recipe's own rows and network, so that only the loop differs. Started by torchrun as several
ranks, it trains with DistributedDataParallel over gloo, or, with `--apart`, a model on each.
Started by mpirun, it sums the flat gradient with mpi4py, and nothing else: no engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import adam, arguments, leave, report, world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.task import Ufs


def main() -> None:
    args = arguments(__doc__, "--loader", "--apart")
    torch.manual_seed(0)
    task = Ufs(UfsConfig(mask_mode="both", squash=False))
    dataset = task.dataset("train")
    assert dataset is not None
    model: nn.Module = task.build_model()
    over_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    together = world()[1] > 1 and not args.apart
    if together and not over_mpi:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adam(model, args)
    batch = args.batch or 1000
    data = loaded(dataset, batch, together) if args.loader else gathered(dataset, batch)

    if over_mpi:
        from mpi4py import MPI  # joins the others: not in a process that mpirun has not started

        total, barrier = summed, MPI.COMM_WORLD.Barrier
    else:
        total, barrier = _nothing, dist.barrier if together else _nothing

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(model(inputs), targets).backward()
        total(model)
        optimizer.step()

    report("ufs", args, batch, step, barrier)
    leave()


def summed(model: nn.Module) -> None:
    """Replace gradients by their mean over all processes of MPI."""
    from mpi4py import MPI

    parameters = list(model.parameters())
    flat = parameters_to_vector([p.grad for p in parameters if p.grad is not None])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
    pieces = flat.div_(world()[1]).split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def _nothing(*_: object) -> None:
    """Nobody is waited for."""


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
