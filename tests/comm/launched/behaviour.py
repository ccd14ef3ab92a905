"""What operations of the `mpi4py` backend do besides moving the right bytes, on two ranks."""

from __future__ import annotations

import gc
import re
import threading
import time
from datetime import timedelta
from typing import Any

import checks
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from lockstep.comm.backend import MpiProcessGroup, init_process_group

group = init_process_group(timeout=timedelta(seconds=30))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
OTHER = 1 - RANK


def raises(kind: type[BaseException], contains: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=re.escape(contains)):
        call(*args, **kwargs)


def fails(error_class: int, call: Any, *args: Any) -> None:
    with pytest.raises(MPI.Exception) as caught:
        call(*args)
    assert caught.value.Get_error_class() == error_class


def mine(*shape: int) -> Tensor:
    return torch.full(shape, RANK + 1.0)


# Identity.


def check_names() -> None:
    assert isinstance(group, MpiProcessGroup)
    assert dist.get_backend() == "mpi4py"
    assert group.getBackendName() == group.name() == group._get_backend_name() == "mpi4py"
    assert group.group_name == group.getGroupName() == dist.group.WORLD.group_name
    assert group.group_desc == "default_pg"
    assert group.rank() == MPI.COMM_WORLD.rank
    sub = dist.new_group([0, 1], group_desc="pair")
    assert sub.group_name != group.group_name
    assert sub.group_desc == "pair"
    assert group._get_backend(torch.device("cpu")) is group
    raises(RuntimeError, "meta", group._get_backend, torch.device("meta"))
    dist.destroy_process_group(sub)


def check_store_is_shared() -> None:
    store = group.get_group_store()
    store.set(f"from {RANK}", str(RANK))
    assert store.get(f"from {OTHER}") == str(OTHER).encode()
    assert dist.distributed_c10d._get_default_store().add("count", 0) == 0


# Work and futures.


def check_asynchronous_work() -> None:
    tensor = mine(1000)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(tensor, torch.full((1000,), 3.0))
    assert work.wait() is True
    assert work.result()[0] is tensor


def check_work_is_asynchronous() -> None:
    """Rank 1 starts late; rank 0 has its work back long before."""
    if RANK == 1:
        time.sleep(0.3)
    tensor = mine(4)
    work = dist.all_reduce(tensor, async_op=True)
    if RANK == 0:
        assert not work.is_completed()
    work.wait()
    assert tensor[0] == 3.0


def check_future_completes_without_wait() -> None:
    seen = threading.Event()
    tensor = mine(4)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    future.add_done_callback(lambda _: seen.set())
    assert seen.wait(timeout=10)
    assert torch.equal(future.value()[0], torch.full((4,), 3.0))


def check_future_then() -> None:
    work = dist.all_reduce(mine(4), async_op=True)
    doubled = work.get_future().then(lambda future: 2 * future.value()[0])
    assert torch.equal(doubled.wait(), torch.full((4,), 6.0))
    assert work.get_future() is work.get_future()
    assert torch.equal(work.get_future().wait()[0], torch.full((4,), 3.0))


def check_future_after_the_end() -> None:
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.get_future().done()


def check_future_callback_may_communicate() -> None:
    def again(future: torch.futures.Future[Any]) -> Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    future = dist.all_reduce(mine(4), async_op=True).get_future().then(again)
    assert torch.equal(future.wait(), torch.full((4,), 6.0))


def check_forgotten_work_keeps_its_memory() -> None:
    target = torch.zeros(4)
    if RANK == 0:
        dist.irecv(target, 1)
        dist.irecv(torch.zeros(200_000), 1)
        gc.collect()
    dist.barrier()
    if RANK == 1:
        dist.isend(torch.ones(4), 0)
        dist.isend(torch.ones(200_000), 0)
        gc.collect()
    dist.barrier()
    deadline = time.monotonic() + 10
    while group._running and time.monotonic() < deadline:
        group._sweep()
    assert not group._running
    assert RANK == 1 or torch.equal(target, torch.ones(4))


def check_many_forgotten_works_are_swept() -> None:
    for _ in range(30):
        for _ in range(100):
            dist.isend(torch.ones(1), OTHER)
        for _ in range(100):
            dist.recv(torch.empty(1), OTHER)
    assert len(group._running) < 1000


def check_timeout_names_group_rank_and_operation() -> None:
    if RANK == 0:
        target = torch.zeros(3)
        work = dist.irecv(target, 1)
        expected = "recv on group '0' (default_pg), rank 0 of 2, was not done within 0.05 s"
        raises(TimeoutError, expected, work.wait, timedelta(seconds=0.05))
        dist.barrier()
        work.wait()
        assert torch.equal(target, torch.ones(3))
    else:
        dist.barrier()
        dist.send(torch.ones(3), 0)


def check_group_timeout_is_the_default() -> None:
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=0.05))
    if RANK == 0:
        raises(TimeoutError, "within 0.05 s", dist.recv, torch.zeros(3), 1, hasty)
        dist.barrier()
    else:
        dist.barrier()
        dist.send(torch.ones(3), 0, hasty)
    hasty.set_timeout(timedelta(seconds=20))
    if RANK == 0:
        time.sleep(0.2)
    dist.all_reduce(mine(2), group=hasty)
    dist.destroy_process_group(hasty)


def check_timeout_of_one_operation() -> None:
    if RANK == 0:
        raises(TimeoutError, "within 0.05 s", dist.barrier, timeout=timedelta(seconds=0.05))
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)
        dist.barrier()


# Point to point.


def check_batch_isend_irecv() -> None:
    out = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    sent = [mine(3), torch.tensor([RANK, 7])]
    ops = [dist.P2POp(dist.isend, tensor, OTHER) for tensor in sent]
    ops = [dist.P2POp(dist.irecv, tensor, OTHER) for tensor in out] + ops
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(out[0], torch.full((3,), OTHER + 1.0))
    assert out[1].tolist() == [OTHER, 7]


def check_receive_from_anyone() -> None:
    if RANK == 0:
        tensor = torch.zeros(2)
        assert dist.recv(tensor) == 1
        assert torch.equal(tensor, torch.ones(2))
    else:
        dist.send(torch.ones(2), 0)


def check_tags_choose_the_message() -> None:
    if RANK == 0:
        dist.isend(torch.tensor([1.0]), 1, tag=1)
        dist.isend(torch.tensor([2.0]), 1, tag=2)
        dist.barrier()
    else:
        first, second = torch.zeros(1), torch.zeros(1)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)
        dist.barrier()


def check_message_of_another_size() -> None:
    if RANK == 1:
        dist.send(torch.ones(3), 0)
        dist.send(torch.ones(9), 0)
    else:
        raises(ValueError, "got 3 elements from rank 1 for a tensor of 5", dist.recv, mine(5), 1)
        fails(MPI.ERR_TRUNCATE, dist.recv, mine(5), 1)


def check_failed_work_knows_why() -> None:
    if RANK == 1:
        dist.send(torch.ones(9), 0)
        return
    work = dist.irecv(torch.zeros(2), 1)
    fails(MPI.ERR_TRUNCATE, work.get_future().wait)
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception().Get_error_class() == MPI.ERR_TRUNCATE
    fails(MPI.ERR_TRUNCATE, work.wait)


def check_mpi_errors_are_raised_as_they_are() -> None:
    fails(MPI.ERR_RANK, group.send, [torch.ones(1)], 17, 0)


# Tensors.


def check_strided_conjugated_and_leaf_tensors() -> None:
    wide = torch.zeros(4, 2)
    wide[:, 1] = RANK + 1
    dist.all_reduce(wide[:, 1])
    assert torch.equal(wide, torch.tensor([[0.0, 3.0]] * 4))
    leaf = torch.full((3,), float(RANK), requires_grad=True)
    dist.broadcast(leaf, 1)
    assert torch.equal(leaf.detach(), torch.ones(3))
    turned = torch.full((2, 3), float(RANK), requires_grad=True).t()
    group.broadcast([turned], _root(1)).wait()
    assert torch.equal(turned.detach(), torch.ones(3, 2))
    z = torch.tensor([1 + 2j, 3 - 1j]) if RANK == 0 else torch.zeros(2, dtype=torch.complex64)
    group.broadcast([z.conj() if RANK == 0 else z], _root(0)).wait()
    assert torch.equal(z, torch.tensor([1 + 2j, 3 - 1j] if RANK == 0 else [1 - 2j, 3 + 1j]))
    group.broadcast([z if RANK == 0 else z.conj()], _root(0)).wait()
    assert torch.equal(z, torch.tensor([1 + 2j, 3 - 1j] if RANK == 0 else [1 - 2j, 3 + 1j]))


def _root(rank: int) -> dist.BroadcastOptions:
    opts = dist.BroadcastOptions()
    opts.rootRank = rank
    return opts


def check_premultiplied_sum() -> None:
    tensor = mine(3)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, torch.full((3,), 1.5))


def check_complex_products() -> None:
    tensor = torch.tensor([1 + 1j, 2 - 1j]) if RANK == 0 else torch.tensor([3j, 1 + 0j])
    group.allreduce([tensor], ReduceOp.PRODUCT).wait()
    assert torch.equal(tensor, torch.tensor([(1 + 1j) * 3j, 2 - 1j]))


def check_meaningless_operations_are_refused() -> None:
    z = torch.ones(2, dtype=torch.complex64)
    raises(TypeError, "MIN is not defined for torch.complex64", group.allreduce, [z], ReduceOp.MIN)
    raises(
        TypeError, "BAND is not defined for torch.float32", dist.all_reduce, mine(2), ReduceOp.BAND
    )
    flags = torch.ones(2, dtype=torch.bool)
    raises(TypeError, "AVG is not defined for torch.bool", dist.all_reduce, flags, ReduceOp.AVG)
    raises(TypeError, "dense", dist.all_reduce, mine(2).to_sparse())
    raises(TypeError, "uint16", dist.all_reduce, torch.ones(2, dtype=torch.uint16))


def check_sizes_that_do_not_fit_are_refused() -> None:
    raises(
        ValueError, "5 elements are not 2 times 2", dist.all_gather_into_tensor, mine(5), mine(2)
    )
    raises(ValueError, "one tensor per rank", dist.all_gather, [mine(2)], mine(2))
    raises(ValueError, "one tensor per rank", dist.all_to_all, [mine(2)], [mine(2)])
    raises(ValueError, "split", dist.all_to_all_single, mine(4), mine(4), [1, 2], [2, 2])
    raises(ValueError, "does not divide", dist.all_to_all_single, mine(3), mine(3))
    raises(ValueError, "dtype", group.all_gather_single, mine(4), mine(2).double())
    with_wrong_part = [[mine(2), mine(3)], [mine(3), mine(2)]][RANK]
    raises(ValueError, "own part", dist.all_gather, with_wrong_part[::-1], mine(2))


def check_every_dtype_travels() -> None:
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64):
        tensor = (mine(4) * 2).to(dtype)
        parts = [torch.empty(4, dtype=dtype) for _ in range(SIZE)]
        group.allgather([parts], [tensor]).wait()
        assert [part.float()[0].item() for part in parts] == [2.0, 4.0]


def check_operations_on_shared_memory() -> None:
    whole = torch.zeros(2, 3)
    whole[RANK] = RANK + 1
    dist.all_gather_into_tensor(whole, whole[RANK])
    assert whole[:, 0].tolist() == [1.0, 2.0]
    parts = torch.arange(4.0) + 10 * RANK
    dist.reduce_scatter_tensor(parts[:2], parts)
    assert parts[:2].tolist() == [[10.0, 12.0], [14.0, 16.0]][RANK]
    swapped = torch.tensor([[0.0, 1.0], [2.0, 3.0]][RANK])
    dist.all_to_all_single(swapped, swapped)
    assert swapped.tolist() == [[0.0, 2.0], [1.0, 3.0]][RANK]


# More of torch's interface.


def check_coalesced_operations() -> None:
    tensors = [mine(2), mine(3, 2).t()]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for tensor in tensors)
    out = [torch.zeros(4), torch.zeros(2)]
    with _coalescing_manager():
        dist.all_gather_into_tensor(out[0], mine(2))
        dist.all_gather_into_tensor(out[1], mine(1))
    assert (out[0].tolist(), out[1].tolist()) == ([1.0, 1.0, 2.0, 2.0], [1.0, 2.0])
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        parts = torch.zeros(2)
        dist.broadcast(parts, 0, async_op=True)
        dist.reduce_scatter_tensor(parts, torch.ones(4), async_op=True)
    manager.wait()
    assert parts.tolist() == [2.0, 2.0]
    future = dist.all_reduce_coalesced([mine(1), mine(2)], async_op=True)
    assert future.wait()[1].tolist() == [3.0, 3.0]
    lists = [[torch.zeros(1), torch.zeros(2)] for _ in range(SIZE)]
    dist.all_gather_coalesced(lists, [mine(1), mine(2)])
    assert [part.tolist() for part in lists[1]] == [[2.0], [2.0, 2.0]]


def check_coalesced_error_is_not_lost() -> None:
    if RANK == 1:
        dist.send(torch.ones(9), 0)
        return
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.irecv(torch.zeros(2), 1)
    fails(MPI.ERR_TRUNCATE, manager.wait)


def check_functional_collectives() -> None:
    total = torch.full((2,), 3.0)
    assert torch.equal(funcol.all_reduce(mine(2), "sum", group), total)
    assert torch.equal(funcol.all_reduce_coalesced([mine(2)], "sum", group)[0], total)
    gathered = funcol.all_gather_tensor(mine(2), 0, group)
    assert gathered.tolist() == [1.0, 1.0, 2.0, 2.0]
    (gathered,) = funcol.all_gather_into_tensor_coalesced([mine(1)], group)
    assert gathered.tolist() == [1.0, 2.0]
    assert torch.equal(funcol.reduce_scatter_tensor(mine(4), "sum", 0, group), total)
    (scattered,) = funcol.reduce_scatter_tensor_coalesced([mine(4)], "sum", [0], group)
    assert torch.equal(scattered, total)
    assert torch.equal(funcol.broadcast(mine(2), 1, group), torch.full((2,), 2.0))
    rows = [1, 2] if RANK == 0 else [2, 1]
    exchanged = funcol.all_to_all_single(mine(3), rows, rows, group)
    assert exchanged.tolist() == [[1.0, 2.0, 2.0], [1.0, 1.0, 2.0]][RANK]


def check_gradients_of_collectives() -> None:
    x = mine(2).requires_grad_()
    (differentiable.all_reduce(x) * (RANK + 1)).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    x = mine(2).requires_grad_()
    torch.cat(differentiable.all_gather(x)).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    x = mine(4).requires_grad_()
    funcol.all_to_all_single_autograd(x, [2, 2], [2, 2], group).sum().backward()
    assert x.grad.tolist() == [1.0] * 4


def check_object_collectives() -> None:
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    objects = ["a", {"b": 2}] if RANK == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    assert objects == ["a", {"b": 2}]
    at_root = [None] * SIZE if RANK == 0 else None
    dist.gather_object("x" * (RANK + 1), at_root, dst=0)
    assert at_root == (["x", "xx"] if RANK == 0 else None)
    mine_: list[Any] = [None]
    dist.scatter_object_list(mine_, ["for 0", "for 1"] if RANK == 0 else None, src=0)
    assert mine_ == [f"for {RANK}"]
    sent: list[Any] = [("message", 1)]
    if RANK == 0:
        dist.send_object_list(sent, dst=1)
    else:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=0)
        assert received == sent


def check_monitored_barrier_names_the_missing() -> None:
    group.monitored_barrier(timedelta(seconds=20))
    if RANK == 0:
        short = timedelta(seconds=0.05)
        raises(TimeoutError, "heard nothing from rank 1", group.monitored_barrier, short)
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


def check_two_groups_in_two_threads() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    sums: list[list[float]] = [[], []]

    def work(i: int) -> None:
        for n in range(100):
            tensor = torch.tensor([float(n + i)])
            dist.all_reduce(tensor, group=groups[i])
            sums[i].append(tensor.item())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sums == [[2.0 * (n + i) for n in range(100)] for i in range(2)]
    for sub in groups:
        dist.destroy_process_group(sub)


# Groups come and go.


def check_communicators_are_registered_and_freed() -> None:
    before = group.world.communicators()
    assert group.comm in before
    sub = dist.new_group([0, 1])
    assert group.world.communicators() == [*before, sub.comm]
    assert sub.world is group.world
    assert sub.comm.Get_errhandler() == MPI.ERRORS_RETURN
    dist.destroy_process_group(sub)
    assert group.world.communicators() == before
    assert sub.comm == MPI.COMM_NULL
    sub.shutdown()


def check_default_group_can_be_made_again() -> None:
    global group
    dist.destroy_process_group()
    assert group.world.communicators() == []
    half = MPI.COMM_WORLD.Split(RANK)
    alone = init_process_group(half)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert alone.world.base == half
    dist.destroy_process_group()
    half.Free()
    group = init_process_group(timeout=timedelta(seconds=30))
    dist.all_reduce(mine(1))


def check_subgroups_of_a_gloo_group() -> None:
    global group
    store = group.get_group_store()
    dist.destroy_process_group()
    gloo_store = dist.PrefixStore("gloo", store)
    dist.init_process_group("gloo", store=gloo_store, rank=RANK, world_size=SIZE)
    sub = dist.new_group([0, 1], backend="mpi4py")
    tensor = mine(2)
    dist.all_reduce(tensor, group=sub)
    assert tensor.tolist() == [3.0, 3.0]
    dist.destroy_process_group()
    group = init_process_group(timeout=timedelta(seconds=30))


def check_ranks_of_another_launcher_are_refused() -> None:
    global group
    dist.destroy_process_group()
    wrong = {"store": dist.HashStore(), "rank": OTHER, "world_size": SIZE}
    raises(
        ValueError,
        f"torch calls this process rank {OTHER} of 2, but MPI says {RANK} of 2",
        dist.init_process_group,
        "mpi4py",
        **wrong,
    )
    group = init_process_group(timeout=timedelta(seconds=30))


def check_abort_fails_what_is_running() -> None:
    if "Open MPI" not in MPI.Get_library_version():
        return  # only fault-tolerant libraries can interrupt an operation
    sub = dist.new_group([0, 1])
    if RANK == 0:
        work = dist.irecv(torch.zeros(1), 1, sub)
        dist.barrier()
        fails(MPI.ERR_REVOKED, work.wait)
    else:
        dist.barrier()
    if RANK == 1:
        sub.abort()


if __name__ == "__main__":
    checks.run(globals())
    dist.destroy_process_group()
