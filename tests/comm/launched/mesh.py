"""Subgroups and device meshes on four ranks."""

from __future__ import annotations

import checks
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lockstep.comm.backend import MpiProcessGroup, init_process_group

group = init_process_group()
RANK = dist.get_rank()


def check_members_only_make_a_group() -> None:
    """Ranks 0 and 2 are not even told of the group; they are in another collective."""
    if RANK in (1, 3):
        sub = dist.new_group([3, 1], use_local_synchronization=True)
        assert (sub.rank(), sub.size()) == (RANK // 2, 2)
        tensor = torch.tensor([float(RANK)])
        dist.all_reduce(tensor, group=sub)
        assert tensor.item() == 4.0
        tensor = torch.tensor([RANK])
        dist.broadcast(tensor, src=3, group=sub)
        assert tensor.item() == 3
        got = torch.zeros(1)
        if RANK == 1:
            dist.send(torch.ones(1), 3, sub)
        else:
            assert dist.recv(got, group=sub) == 1
        dist.destroy_process_group(sub)
    dist.barrier()


def check_non_members_get_no_group() -> None:
    sub = dist.new_group([0, 3])
    assert (sub is dist.GroupMember.NON_GROUP_MEMBER) == (RANK in (1, 2))
    assert len(group.world.communicators()) == (1 if RANK in (1, 2) else 2)
    if RANK in (0, 3):
        dist.destroy_process_group(sub)


def check_mesh_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, expected in (("outer", [RANK % 2, RANK % 2 + 2]), ("inner", None)):
        axis = mesh.get_group(name)
        assert isinstance(axis, MpiProcessGroup)
        ranks = expected or [RANK // 2 * 2, RANK // 2 * 2 + 1]
        assert dist.get_process_group_ranks(axis) == ranks
        gathered = torch.zeros(2, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([RANK]), group=axis)
        assert gathered.tolist() == ranks
    flat = mesh._flatten("all")
    total = torch.ones(1)
    dist.all_reduce(total, group=flat.get_group())
    assert total.item() == 4.0


def check_tensors_on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(60.0).reshape(6, 10)
    placed = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert placed.to_local().shape == (3, 5)
    assert torch.equal(placed.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    product = placed @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
    uneven = distribute_tensor(torch.arange(7.0), mesh, [Shard(0), Replicate()])
    assert torch.equal(uneven.full_tensor(), torch.arange(7.0))


def check_two_dimensional_training() -> None:
    """FSDP2 over one axis and tensor parallelism over the other equal one process."""

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 6, generator=generator)
    model = parallelize_module(
        network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])
    model(inputs.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    reference = network()
    reference(inputs).square().mean().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(a.grad, DTensor)
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-5, atol=1e-6)


def check_half_precision_rounds_once() -> None:
    """1 + e + e is 1 if every sum is rounded; whatever the order, one of the columns shows it."""
    for dtype, e in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        columns = torch.tensor([[1, e, e, 0], [e, 1, 0, e], [e, 0, 1, e], [0, e, e, 1]])
        tensor = columns[:, RANK].to(dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.float(), torch.full((4,), 1 + 2 * e))
        scattered = torch.zeros(1, dtype=dtype)
        dist.reduce_scatter_tensor(scattered, columns[:, RANK].to(dtype))
        assert scattered.item() == 1 + 2 * e


def check_groups_are_freed_together() -> None:
    dist.destroy_process_group()
    assert group.world.communicators() == []
    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    checks.run(globals())
