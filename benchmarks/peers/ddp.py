"""Peer: PyTorch's DistributedDataParallel on gloo, as fast as it goes."""

from __future__ import annotations

import torch.distributed as dist
from harness import adam, arguments, batches, leave, report, world
from models import workload
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments(__doc__)
    if world()[1] > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    # Saves time: gradients are reduced where they lie, not copied out of buckets.
    model = DistributedDataParallel(work.model, gradient_as_bucket_view=True)
    optimizer = adam(model, args)

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        work.loss(model(inputs), targets).backward()
        optimizer.step()

    report("ddp", args, batch, step, dist.barrier)
    leave()


if __name__ == "__main__":
    main()
