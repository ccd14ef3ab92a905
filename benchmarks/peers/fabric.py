"""Peer: Lightning Fabric, with DDP on gloo beneath it."""

from __future__ import annotations

import torch
from harness import adam, arguments, batches, leave, report, world
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from models import workload


def main() -> None:
    args = arguments(__doc__)
    world_size = world()[1]
    ddp = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy=ddp if world_size > 1 else "auto"
    )
    fabric.launch()
    # Fabric may have set the number of threads from the environment.
    torch.set_num_threads(args.threads)
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    model, optimizer = fabric.setup(work.model, adam(work.model, args))

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(work.loss(model(inputs), targets))
        optimizer.step()

    report("fabric", args, batch, step, fabric.barrier)
    leave()


if __name__ == "__main__":
    main()
