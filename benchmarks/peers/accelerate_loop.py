"""Peer: Hugging Face Accelerate, with DDP on gloo beneath it."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from harness import adam, arguments, batches, leave, report, world
from models import workload


def main() -> None:
    args = arguments(__doc__)
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    if accelerator.num_processes != world()[1]:
        sys.exit(f"Accelerate sees {accelerator.num_processes} processes, not {world()[1]}")
    # Accelerate may have set the number of threads from the environment.
    torch.set_num_threads(args.threads)
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    model, optimizer = accelerator.prepare(work.model, adam(work.model, args))

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        accelerator.backward(work.loss(model(inputs), targets))
        optimizer.step()

    report("accelerate", args, batch, step, accelerator.wait_for_everyone)
    leave()


if __name__ == "__main__":
    main()
