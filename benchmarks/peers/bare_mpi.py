"""Peer: a plain loop whose ranks add up one flat gradient by `MPI_Allreduce`, and do nothing else.

No framework, no order of additions, no check. With `--meet` they only wait for each other in
`MPI_Barrier`: what it costs that a step is as long as that of its slowest rank.
"""

from __future__ import annotations

import torch
from harness import adam, arguments, batches, report
from models import workload
from mpi4py import MPI


def main() -> None:
    args = arguments(__doc__, "--meet")
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    model = work.model
    optimizer = adam(model, args)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    world, gradient = MPI.COMM_WORLD, flat.numpy()

    def exchange() -> None:
        if args.meet:
            world.Barrier()
        else:
            world.Allreduce(MPI.IN_PLACE, gradient)
            flat.div_(world.size)

    def step() -> None:
        inputs, targets = next(data)
        flat.zero_()
        work.loss(model(inputs), targets).backward()
        exchange()
        optimizer.step()

    report("bare MPI", args, batch, step, world.Barrier)


if __name__ == "__main__":
    main()
