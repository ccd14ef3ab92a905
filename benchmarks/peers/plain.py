"""Peer: a hand-written loop, no framework. What a step costs at the least.

Started as several ranks, each trains a model of its own: what a step would cost without exchange.
"""

from __future__ import annotations

from harness import adam, arguments, batches, report
from models import workload


def main() -> None:
    args = arguments(__doc__)
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
