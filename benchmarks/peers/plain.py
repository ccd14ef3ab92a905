"""Peer: a hand-written loop in one process, no framework. What a step costs at the least."""

from __future__ import annotations

import sys

from harness import adam, arguments, batches, report, world
from models import workload


def main() -> None:
    args = arguments(__doc__)
    if world()[1] > 1:
        sys.exit("plain.py does not communicate: run it with plain python, not torchrun")
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    model = work.model
    optimizer = adam(model, args)

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        work.loss(model(inputs), targets).backward()
        optimizer.step()

    report("plain", args, batch, step, barrier=lambda: None)


if __name__ == "__main__":
    main()
