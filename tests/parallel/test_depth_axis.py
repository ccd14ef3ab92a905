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
from lockstep.parallel.depth_axis import DepthAxis, balanced
from lockstep.parallel.layout import Range
from lockstep.parallel.pipeline_schedule import one_forward_one_backward

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
@given(st.integers(0, 5), st.integers(0, 12), st.integers(1, 6))
def test_stages_never_wait_for_one_another_in_a_circle(
    first: int, count: int, num_stages: int
) -> None:
    microbatches = Range(first, first + count)
    orders = [
        list(one_forward_one_backward(microbatches, stage, num_stages))
        for stage in range(num_stages)
    ]
    for stage, order in enumerate(orders):
        for kind in ("forward", "backward"):
            assert [p.microbatch for p in order if p.kind == kind] == list(range(*microbatches))
        open_passes = itertools.accumulate(1 if p.kind == "forward" else -1 for p in order)
        assert max(open_passes, default=0) <= num_stages - stage
    # A forward pass needs that of the stage before, a backward pass that of the stage behind.
    done: set[tuple[int, str, int]] = set()
    while any(orders):
        ready = [
            (stage, order)
            for stage, order in enumerate(orders)
            if order and _needed(stage, num_stages, *order[0]) <= done
        ]
        assert ready
        for stage, order in ready:
            done.add((stage, *order.pop(0)))


def _needed(stage: int, num_stages: int, kind: str, microbatch: int) -> set[tuple[int, str, int]]:
    needed = set()
    if kind == "forward" and stage:
        needed.add((stage - 1, kind, microbatch))
    if kind == "backward" and stage < num_stages - 1:
        needed.add((stage + 1, kind, microbatch))
    return needed


TENSORS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.arange(4, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([1 + 2j, 3j]),
    torch.empty(0, 5),
    torch.arange(3),
    None,
]


def test_tensors_arrive_as_they_are() -> None:
    trained = torch.ones(2, requires_grad=True) * 3

    def body(transport: ThreadTransport) -> list[Tensor | None]:
        axis = DepthAxis([Range(0, 1), Range(1, 3)], transport)
        if axis.is_first:
            axis.send([*TENSORS, trained], 1)
            axis.send([], 1)
            axis.finish()
            return []
        received = axis.receive(0)
        assert axis.receive(0) == []
        assert (axis.stage, axis.is_last, axis.own) == (1, True, Range(1, 3))
        assert axis.stage_of(0) == 0
        return received

    *plain, last = on_ranks(2, body)[1]
    for there, here in zip(plain, TENSORS, strict=True):
        if here is None or there is None:
            assert here is there
        else:
            assert there.dtype == here.dtype
            assert torch.equal(there, here)
            assert there.is_contiguous()
            assert not there.requires_grad
    assert last is not None
    assert last.requires_grad
    assert last.is_leaf
    assert last.tolist() == [3.0, 3.0]


def test_what_cannot_be_sent() -> None:
    axis = DepthAxis([Range(0, 1)])
    with pytest.raises(TaskError, match="of 9 dims, which cannot go to another stage"):
        axis.send([torch.zeros([1] * 9)], 0)


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
    axis.send([torch.ones(2), torch.ones(3)], 1)
    with pytest.raises(GroupBroken):
        axis.finish()
    assert len(transport.messages) == 4
    assert all(message() is not None for message in transport.messages)
