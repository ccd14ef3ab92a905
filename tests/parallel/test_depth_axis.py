"""Stages: their blocks, the order of their passes, and what goes from one to the next."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor

from lockstep.comm.transport import GroupBroken, LocalTransport, Sending
from lockstep.errors import TaskError
from lockstep.parallel.axes import TIED, DepthAxis, balanced
from lockstep.parallel.layout import Pass, Range, one_forward_one_backward

costs = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@settings(deadline=None)
@given(costs, st.integers(1, 9))
def test_stages_are_as_balanced_as_can_be(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    stages = balanced(costs, num_stages)
    assert [stage.first for stage in stages] == [0, *(stage.last for stage in stages[:-1])]
    assert stages[-1].last == len(costs)
    assert min(map(len, stages)) > 0
    ways = itertools.combinations(range(1, len(costs)), num_stages - 1)
    least = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)])) for cuts in ways
    )
    assert max(sum(costs[slice(*stage)]) for stage in stages) == least


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 25), st.integers(1, 6), st.integers(1, 5))
def test_stages_never_wait_for_one_another_in_a_circle(
    first: int, count: int, num_ranks: int, interleave: int
) -> None:
    microbatches = Range(first, first + count)
    orders = _orders(microbatches, num_ranks, interleave)
    for place, order in enumerate(orders):
        for stage in range(place, num_ranks * interleave, num_ranks):
            for kind in ("forward", "backward"):
                there = [p.microbatch for p in order if (p.kind, p.stage) == (kind, stage)]
                assert there == list(range(*microbatches))
        open_passes = itertools.accumulate(1 if p.kind == "forward" else -1 for p in order)
        if interleave == 1:
            assert max(open_passes, default=0) <= num_ranks - place
    _played(orders, num_ranks * interleave)


@pytest.mark.parametrize(
    ("count", "num_ranks", "interleave"), [(8, 2, 1), (8, 2, 2), (7, 2, 3), (9, 4, 2), (13, 3, 4)]
)
def test_how_long_stages_are_idle(count: int, num_ranks: int, interleave: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: the pipeline's flush divided by the stages of each."""
    orders = _orders(Range(0, count), num_ranks, interleave)
    took = _played(orders, num_ranks * interleave)
    computing = 3 * count * interleave
    assert took == computing + 3 * (num_ranks - 1)


def _orders(microbatches: Range, num_ranks: int, interleave: int) -> list[list[Pass]]:
    return [
        list(one_forward_one_backward(microbatches, place, num_ranks, interleave))
        for place in range(num_ranks)
    ]


def _played(orders: list[list[Pass]], num_stages: int) -> int:
    """When all is done, if a forward pass of a stage takes 1 and a backward pass 2."""
    done: dict[Pass, int] = {}
    free = [0] * len(orders)
    left = [order.copy() for order in orders]
    while any(left):
        ready = [
            (place, order) for place, order in enumerate(left)
            if order and _needed(order[0], num_stages) <= done.keys()
        ]  # fmt: skip
        assert ready
        for place, order in ready:
            one = order.pop(0)
            begin = max([free[place], *(done[n] for n in _needed(one, num_stages))])
            free[place] = done[one] = begin + (1 if one.kind == "forward" else 2)
    return max(free)


def _needed(one: Pass, num_stages: int) -> set[Pass]:
    """A forward pass needs that of the stage before, a backward pass that of the stage behind."""
    kind, microbatch, stage = one
    if kind == "forward":
        return {Pass("forward", microbatch, stage - 1)} if stage else set()
    needed = {Pass("forward", microbatch, stage)}
    if stage < num_stages - 1:
        needed.add(Pass("backward", microbatch, stage + 1))
    return needed


TENSORS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.arange(4, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([1 + 2j, 3j]),
    torch.empty(0, 5),
    torch.arange(3),
]


def test_tensors_arrive_as_they_are() -> None:
    trained = torch.ones(2, requires_grad=True) * 3

    def body(transport: ThreadTransport) -> list[Tensor]:
        axis = DepthAxis([Range(0, 1), Range(1, 3)], transport)
        if axis.is_first:
            axis.send_outputs([*TENSORS, trained])
            axis.send([], 1, TIED)
            axis.send([None], 1, TIED)
            axis.finish()
            return []
        assert axis.receive(0, TIED) == []  # what comes before it waits
        assert axis.receive(0, TIED) == [None]
        received = axis.receive_inputs()
        assert (axis.stage, axis.is_last, axis.own) == (1, True, Range(1, 3))
        assert axis.rank_of(0) == 0
        return received

    *plain, last = on_ranks(2, body)[1]
    for there, here in zip(plain, TENSORS, strict=True):
        assert there.dtype == here.dtype
        assert torch.equal(there, here)
        assert there.is_contiguous()
        assert not there.requires_grad
    assert last.requires_grad
    assert last.is_leaf
    assert last.tolist() == [3.0, 3.0]


def test_a_rank_has_every_so_manieth_stage() -> None:
    stages = [Range(n, n + 1) for n in range(4)]

    def body(transport: ThreadTransport) -> list[float]:
        axis = DepthAxis(stages, transport)
        assert list(axis.own_stages) == [transport.rank, transport.rank + 2]
        assert [axis.rank_of(block) for block in range(4)] == [0, 1, 0, 1]
        passed = []
        for stage in axis.own_stages:
            axis.enter(stage)
            tensor = torch.zeros(1)
            if not axis.is_first:
                [tensor] = axis.receive_inputs()
            passed.append(tensor.item())
            if not axis.is_last:
                axis.send_outputs([tensor + 1])
        axis.finish()
        return passed

    assert on_ranks(2, body) == [[0.0, 2.0], [1.0, 3.0]]


def test_what_cannot_be_sent() -> None:
    axis = DepthAxis([Range(0, 1)])
    with pytest.raises(TaskError, match="of 9 dims, which cannot go to another stage"):
        axis.send([torch.zeros([1] * 9)], 0, TIED)


class Breaking(LocalTransport):
    """Sends that are still under way when the group breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[weakref.ref[Tensor]] = []

    def send(self, tensor: Tensor, to: int) -> Sending:
        self.messages.append(weakref.ref(tensor))
        return Sending(self, None, tensor)

    def finish_sending(self, handle: Any) -> None:
        raise GroupBroken("a rank died")


def test_what_is_still_under_way_keeps_its_memory() -> None:
    transport = Breaking()
    axis = DepthAxis([Range(0, 1), Range(1, 2)], transport)
    axis.send_outputs([torch.ones(2), torch.ones(3)])
    with pytest.raises(GroupBroken):
        axis.finish()
    assert len(transport.messages) == 3
    assert all(message() is not None for message in transport.messages)
