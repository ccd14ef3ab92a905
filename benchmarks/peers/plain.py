"""Peer: a hand-written loop, no framework. What a step costs at the least.

Started as several ranks, each trains a model of its own: what a step would cost without exchange.
With `--guarded` it also does by hand, in as few calls as there can be, what Lockstep promises of a
step on one rank: random numbers that depend on the step alone, a gradient in flat memory whose norm
must be finite, a loss that must be, and parameters that no pass has changed.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from harness import adam, arguments, batches, report
from models import workload


def main() -> None:
    args = arguments(__doc__, "--guarded")
    work = workload(args.model)
    batch = args.batch or work.batch
    data = batches(work, batch)
    model = work.model
    optimizer = adam(model, args)
    parameters = list(model.parameters())
    numels = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(numels))
    views = [v.view_as(p) for v, p in zip(flat.split(numels), parameters, strict=True)]
    num_steps = 0

    def step() -> None:
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        work.loss(model(inputs), targets).backward()
        optimizer.step()

    def guarded_step() -> None:
        nonlocal num_steps
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        num_steps += 1
        torch.default_generator.manual_seed(num_steps)
        random.seed(num_steps)
        np.random.seed(num_steps)
        versions = [parameter._version for parameter in parameters]
        loss = work.loss(model(inputs), targets)
        loss.backward()
        if versions != [parameter._version for parameter in parameters]:
            raise RuntimeError("a pass has changed a parameter")
        torch._foreach_copy_(views, [parameter.grad for parameter in parameters])
        norm = torch.linalg.vector_norm(flat).item()
        if not (math.isfinite(loss.item()) and math.isfinite(norm)):
            raise RuntimeError("the loss or the gradient is not finite")
        flat.mul_(1.0)  # from a sum to a mean, or to a clipped one
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        optimizer.step()

    report("plain", args, batch, guarded_step if args.guarded else step, barrier=lambda: None)


if __name__ == "__main__":
    main()
