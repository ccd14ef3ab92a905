"""The layers of `sharded_layers.py` with DTensor's tensor parallelism over gloo, under torchrun.

Prints the same line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from sharded_layers import arguments, digest, model_and_input, timed


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, x = model_and_input(args.model, args.width, args.rows)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x.requires_grad_()
    outcome: list[Tensor] = []

    def work() -> None:
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.square().mean().backward()
        assert x.grad is not None
        outcome[:] = [y, x.grad]

    seconds = timed(work, dist.barrier, args.repeats)
    if dist.get_rank() == 0:
        flat = torch.cat([t.detach().flatten() for t in outcome])
        print(json.dumps({"seconds": seconds, "digest": digest(flat)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
