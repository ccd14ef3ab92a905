"""Peer: a hand-written loop, no framework. What a step costs at the least.

Started as several ranks, each trains a model of its own: what a step would cost without exchange.
With `--guarded` it also keeps the promises of `guarded.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from guarded import guarded_step
from harness import adam, arguments, batches, report
from models import workload


def main() -> None:
    args = arguments(__doc__, "--guarded")
    work = workload(args.model)
    work.model.to(args.device)
    batch = args.batch or work.batch
    data = batches(work, batch, args.device)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    if args.dtype == "bf16":
        autocast = partial(torch.autocast, args.device, torch.bfloat16)
    optimizer = adam(work.model, args)

    def plain_step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = work.loss(work.model(inputs), targets)
        loss.backward()
        optimizer.step()

    guarded = guarded_step(work, data, optimizer, add_up=lambda message: None, world_size=1)
    step = guarded if args.guarded else plain_step
    report("plain", args, batch, step, barrier=lambda: None)


if __name__ == "__main__":
    main()
