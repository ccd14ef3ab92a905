"""A training loop of its own with `ls.Reducer`; rank 0 prints what came of it.

Arguments: `alone`, `torch` (the default process group), `subgroup` or `mpi`; and what goes wrong.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls

NUM_MICROBATCHES = 7


def group_of(kind):
    if kind in ("torch", "subgroup"):
        dist.init_process_group("gloo")
        return dist.new_group(range(dist.get_world_size())) if kind == "subgroup" else None
    if kind == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD
    return None


def main(kind, evil=""):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Dropout(0.2), nn.Linear(300, 3)).double()
    model[0].bias.requires_grad_(False)
    x, y = torch.randn(90, 5).double(), torch.randint(0, 3, (90,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = ls.Reducer(
        model.parameters(), NUM_MICROBATCHES, group_of(kind), sums=("loss", "correct"), seed=3
    )
    for step in range(5):
        parts = torch.randperm(90, generator=torch.Generator().manual_seed(step))[: 40 + step]
        for m in reducer.microbatches(step):
            rows = parts[m::NUM_MICROBATCHES]
            output = model(x[rows])
            loss = nn.functional.cross_entropy(output, y[rows], reduction="sum")
            loss.backward()
            if evil and step == 2 and m == NUM_MICROBATCHES - 1:
                continue
            reducer.add(len(rows), loss=loss, correct=(output.argmax(1) == y[rows]).sum())
        means = reducer.reduce()
        optimizer.step()
    sha = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    if reducer.rank == 0:
        print("RESULT", sha.hexdigest(), means["loss"], means["correct"], flush=True)
    reducer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


main(*sys.argv[1:])
