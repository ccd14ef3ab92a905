"""A step of a hand-written loop that keeps Lockstep's promises, in as few calls as there can be.

Random numbers that depend on the step alone, a gradient in flat memory whose norm must be finite, a
loss that must be, and parameters that no pass has changed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from models import Workload
from torch import Tensor


def guarded_step(
    work: Workload,
    data: Iterator[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    add_up: Callable[[Tensor], None],
    world_size: int,
) -> Callable[[], None]:
    """A function that does one step.

    Args:
        work: model and loss.
        data: batches of this rank.
        optimizer: steps the model's parameters.
        add_up: sums a flat tensor in place over the ranks.
        world_size: number of ranks.
    """
    parameters = list(work.model.parameters())
    numels = [parameter.numel() for parameter in parameters]
    message = torch.zeros(sum(numels) + 1)  # the gradient and the loss
    flat = message[:-1]
    views = [v.view_as(p) for v, p in zip(flat.split(numels), parameters, strict=True)]
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        inputs, targets = next(data)
        optimizer.zero_grad(set_to_none=True)
        num_steps += 1
        torch.default_generator.manual_seed(num_steps)
        random.seed(num_steps)
        np.random.seed(num_steps)
        versions = [parameter._version for parameter in parameters]
        loss = work.loss(work.model(inputs), targets)
        loss.backward()
        if versions != [parameter._version for parameter in parameters]:
            raise RuntimeError("a pass has changed a parameter")
        torch._foreach_copy_(views, [parameter.grad for parameter in parameters])
        message[-1] = loss.detach()
        add_up(message)
        norm = torch.linalg.vector_norm(flat).item()
        if not (math.isfinite(message[-1].item()) and math.isfinite(norm)):
            raise RuntimeError("the loss or the gradient is not finite")
        flat.mul_(1 / world_size)  # from a sum to a mean, or to a clipped one
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        optimizer.step()

    return step
