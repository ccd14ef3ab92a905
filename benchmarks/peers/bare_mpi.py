"""Peer: a plain loop whose ranks add up one flat gradient by `MPI_Allreduce`, and do nothing else.

No framework, no order of additions, no check. With `--meet` they only wait for each other in
`MPI_Barrier`: what it costs that a step is as long as that of its slowest rank. With `--guarded`
they also keep the promises of `guarded.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from guarded import guarded_step
from harness import adam, arguments, batches, report
from models import Workload, workload
from mpi4py import MPI
from torch import Tensor


def main() -> None:
    args = arguments(__doc__, "--meet", "--guarded")
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    optimizer = adam(work.model, args)
    world = MPI.COMM_WORLD

    def add_up(message: Tensor) -> None:
        world.Allreduce(MPI.IN_PLACE, message.numpy())

    def take_mean(flat: Tensor) -> None:
        add_up(flat)
        flat.div_(world.size)

    def meet(flat: Tensor) -> None:
        world.Barrier()

    if args.guarded:
        step = guarded_step(work, data, optimizer, add_up, world.size)
    else:
        step = bare_step(work, data, optimizer, meet if args.meet else take_mean)
    report("bare MPI", args, batch, step, world.Barrier)


def bare_step(
    work: Workload,
    data: Iterator[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    exchange: Callable[[Tensor], None],
) -> Callable[[], None]:
    """A function that does one step and checks nothing; autograd writes into flat memory."""
    parameters = list(work.model.parameters())
    numels = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(numels))
    for parameter, part in zip(parameters, flat.split(numels), strict=True):
        parameter.grad = part.view_as(parameter)

    def step() -> None:
        inputs, targets = next(data)
        flat.zero_()
        work.loss(work.model(inputs), targets).backward()
        exchange(flat)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
