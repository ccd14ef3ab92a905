"""What torch builds on a process group works on this one: two ranks against one process."""

from __future__ import annotations

import copy
import shutil

import checks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.backend import init_process_group

group = init_process_group()
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def share(tensor: Tensor) -> Tensor:
    return tensor.chunk(SIZE)[RANK]


def steps(model: nn.Module, inputs: Tensor, targets: Tensor, optimizer: object = None) -> nn.Module:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def same(model: nn.Module, reference: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(whole, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n} {m}")


def check_ddp() -> None:
    x, y = batch()
    model = DistributedDataParallel(network())
    same(steps(model, share(x), share(y)).module, steps(network(), x, y))


def check_ddp_broadcasts_rank_0() -> None:
    torch.manual_seed(RANK)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    torch.manual_seed(0)
    assert torch.equal(model.module[0].weight, nn.Linear(3, 3).weight)


def check_ddp_python_comm_hook() -> None:
    calls = []

    def hook(state, bucket):  # DDP compares annotations, which are strings here
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / SIZE)

    x, y = batch()
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, hook)
    same(steps(model, share(x), share(y)).module, steps(network(), x, y))
    assert len(calls) == 3


def check_ddp_half_precision_hook() -> None:
    x, y = batch()
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    reference = steps(network(), x, y)
    steps(model, share(x), share(y))
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    assert not torch.equal(model.module[0].weight, reference[0].weight)


def check_ddp_hook_that_communicates_in_a_callback() -> None:
    x, y = batch()
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    steps(model, share(x), share(y))
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(both, mine)
    assert torch.equal(both[0], both[1])
    assert state.iter >= 3


def check_ddp_join_with_uneven_inputs() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model.module.weight.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Join([model]):
        for _ in range(2 + RANK):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    weights = [torch.empty(1, 2) for _ in range(SIZE)]
    dist.all_gather(weights, model.module.weight.detach())
    assert torch.equal(weights[0], weights[1])
    # Two steps of gradient 1, then one in which only rank 1 had data: 1 / SIZE.
    torch.testing.assert_close(weights[0], torch.full((1, 2), -2.5))


def check_zero_redundancy_optimizer() -> None:
    x, y = batch()
    model = DistributedDataParallel(network())
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    reference = network()
    steps(reference, x, y, torch.optim.Adam(reference.parameters(), lr=0.01))
    same(steps(model, share(x), share(y), sharded).module, reference)


def check_tensor_parallel() -> None:
    x, y = batch()
    mesh = init_device_mesh("cpu", (SIZE,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert isinstance(model[0].weight, DTensor)
    assert model[0].weight.to_local().shape == (16 // SIZE, 6)
    same(steps(model, x, y), steps(network(), x, y))


def check_fsdp2() -> None:
    x, y = batch()
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (SIZE,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    assert isinstance(model[0].weight, DTensor)
    same(steps(model, share(x), share(y)), steps(network(), x, y))


def check_checkpoint() -> None:
    folder = checks.shared_folder()
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    dcp.save({"sharded": sharded, "step": 7}, checkpoint_id=folder / "sync")
    dcp.async_save({"sharded": sharded, "step": 8}, checkpoint_id=folder / "async").result()
    for name, step in (("sync", 7), ("async", 8)):
        state = {"sharded": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "step": 0}
        dcp.load(state, checkpoint_id=folder / name)
        assert torch.equal(state["sharded"].full_tensor(), whole)
        assert state["step"] == step
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def check_pipeline_1f1b() -> None:
    x, y = batch()
    reference = network()
    stages = [copy.deepcopy(reference[:2]), copy.deepcopy(reference[2:])]
    stage = PipelineStage(stages[RANK], RANK, SIZE, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    if RANK == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    loss = nn.functional.mse_loss(reference(x), y)
    loss.backward()
    if RANK == 1:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    ours = list(stages[RANK].parameters())
    theirs = list((reference[:2] if RANK == 0 else reference[2:]).parameters())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    checks.run(globals())
    dist.destroy_process_group()
