"""Blocks one after another: the bits of one process in any stages; tied weights; bad blocks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.nn.models import TOKENS, Deep, Sketched
from tests.thread_transport import Meeting, ThreadTransport
from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.nn.cutting import every_tensor, held_tensors, keep, load_held, units_of
from lockstep.nn.holding import Holding, Unit
from lockstep.nn.row import Pipeline, StageDone
from lockstep.parallel.axes import DepthAxis
from lockstep.parallel.layout import Range

TOKENS_IN = torch.randint(0, TOKENS, (4, 6), generator=torch.Generator().manual_seed(1))
ONE_SHARD = Range(0, 1)


def deep(task: type[Deep] = Deep) -> Pipeline:
    torch.manual_seed(0)
    model = task().build_model()
    assert isinstance(model, Pipeline)
    return model


def gradients_of(stages: list[Pipeline]) -> list[dict[str, Tensor]]:
    """Gradients of one microbatch, of each stage; one after another, as they wait for each other.

    Kernels may split sums otherwise in threads, so ranks are no threads here.
    """
    for model in stages:
        model.ties.refresh(model.axis, None)
    outputs: list[tuple[Tensor, ...]] = []
    for model in stages:
        assert model.axis is not None
        torch.manual_seed(5)
        try:
            with model.open():
                outputs.append((model(TOKENS_IN).square().sum(),))
        except StageDone as done:
            done.send()
            outputs.append(done.outputs)
    for model, computed in reversed(list(zip(stages, outputs, strict=True))):
        axis = model.axis
        assert axis is not None
        if axis.is_last:
            computed[0].backward()
        else:
            gradients = axis.receive_gradients()
            pairs = [(o, g) for o, g in zip(computed, gradients, strict=True) if g is not None]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if not axis.is_first:
            axis.send_gradients([t.grad for t in model.inputs])
    for model in reversed(stages):
        model.ties.collect(model.axis)
    return [
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in stages
    ]


@pytest.mark.parametrize("cuts", [(3,), (1, 6), (2, 3, 4, 5)])
@pytest.mark.parametrize("task", [Deep, Sketched])
def test_any_stages_give_the_same_bits(cuts: tuple[int, ...], task: type[Deep]) -> None:
    whole = deep(task)
    whole.axis = DepthAxis([Range(0, 7)])
    whole.untie()
    assert [(t.original, t.names) for t in whole.ties] == [
        ("0.embedding.weight", ["6.head.weight"])
    ]
    start = copy.deepcopy(whole)
    [wanted] = gradients_of([whole])
    assert "6.head.weight" not in wanted
    ranges = [Range(a, b) for a, b in itertools.pairwise([0, *cuts, 7])]
    meeting = Meeting(len(ranges))
    stages = []
    for rank in range(len(ranges)):
        stage = copy.deepcopy(start)
        stage.axis = DepthAxis(ranges, ThreadTransport(meeting, rank))
        own = Holding((stage.axis.own,), ONE_SHARD)
        keep(stage, own)
        assert held_tensors(stage, own).keys() < every_tensor(stage).keys()
        stages.append(stage)
    everyone = gradients_of(stages)
    assert sorted(name for theirs in everyone for name in theirs) == sorted(wanted)
    for theirs in everyone:
        for name, gradient in theirs.items():
            assert torch.equal(gradient, wanted[name]), name


def test_outside_of_a_run_it_is_a_sequential() -> None:
    model = deep()
    plain = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    piped = Pipeline(*plain)
    torch.manual_seed(1)
    there = plain(torch.ones(2, 3))
    torch.manual_seed(1)
    assert torch.equal(piped(torch.ones(2, 3)), there)
    assert model.state_dict().keys() == copy.deepcopy(model).state_dict().keys()


def test_units() -> None:
    model = deep()
    model.untie()
    units = units_of(model)
    assert units["0.embedding.weight"] == units["6.head.weight"] == Unit(0)
    assert units["3.norm.weight"] == Unit(3)
    assert "3.norm.running_mean" not in units
    own = Holding((Range(5, 6), Range(6, 7)), ONE_SHARD)
    keep(model, own)
    held = held_tensors(model, own)
    assert "6.head.weight" not in held  # another stage trains it
    assert "5.gain" in held
    assert "4.gain" not in held  # a scalar, too
    load_held(model, own, {name: torch.ones_like(t) for name, t in held.items()})
    assert model.state_dict()["5.up.weight"].eq(1).all()


def test_a_weight_of_three_blocks_has_a_gradient_of_each() -> None:
    first, second, *third = (nn.Linear(3, 3, bias=False) for _ in range(4))
    for layer in (second, *third):
        layer.weight = first.weight
    model = Pipeline(first, nn.Tanh(), second, nn.Sequential(*third))
    plain = copy.deepcopy(model)
    model.axis = DepthAxis([Range(0, 4)])
    model.untie()
    assert [(t.names, t.block) for t in model.ties] == [
        (["2.weight"], 2), (["3.0.weight", "3.1.weight"], 3),
    ]  # fmt: skip
    x = torch.randn(2, 3)
    model(x).sum().backward()
    model.ties.collect(model.axis)
    plain(x).sum().backward()
    torch.testing.assert_close(first.weight.grad, plain[0].weight.grad)
    assert second.weight.grad is third[0].weight.grad is None
    assert second.weight is not third[0].weight
    assert third[0].weight is third[1].weight


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize(("value", "kind"), [({"x": 1}, "dict"), ((torch.ones(1), 3), "int")])
def test_what_is_no_tensor_cannot_go_to_the_next_block(value: Any, kind: str) -> None:
    model = Pipeline(Returns(value), nn.Identity())
    with pytest.raises(TaskError, match=f"block 0 returned a {kind}"):
        model(torch.ones(1))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones([1] * 9), "a tensor of 9 dims, which cannot go to another stage"),
        (torch.ones(2, dtype=torch.uint16), "a tensor of dtype torch.uint16, which"),
        (torch.ones(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo, which"),
    ],
)
def test_what_no_message_can_tell_of_cannot_go_to_another_stage(value: Tensor, words: str) -> None:
    model = Pipeline(Returns(value), nn.Identity())
    assert model(torch.ones(1)) is value  # a plain Sequential
    model.axis = DepthAxis([Range(0, 2)])  # on any mesh alike
    with pytest.raises(TaskError, match=f"Pipeline: block 0 returned {words}"):
        model(torch.ones(1))


def test_a_shared_parameter_that_no_message_can_tell_of() -> None:
    first, second = Returns(None), Returns(None)
    first.weight = second.weight = nn.Parameter(torch.ones([2] * 9))
    model = Pipeline(first, second)
    with pytest.raises(TaskError, match=r"1\.weight of an earlier block is a tensor of 9 dims"):
        model.untie()


def test_every_block_is_a_module_and_has_all_that_is_trained() -> None:
    with pytest.raises(TaskError, match="block 1 is None"):
        Pipeline(nn.Identity(), None)(torch.ones(1))
    model = Pipeline(nn.Identity())
    model.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(TaskError, match="gain is the Pipeline's own and belongs to no block"):
        model.untie()


def test_a_model_in_stages_is_called_once() -> None:
    model = Pipeline(nn.Linear(2, 2))
    model.axis, model.is_called_once = DepthAxis([Range(0, 1)]), True
    with model.open():
        model(torch.ones(1, 2))
        with pytest.raises(TaskError, match="calls the model twice"):
            model(torch.ones(1, 2))
    with model.open():
        model(torch.ones(1, 2))


def test_a_stage_is_called_by_the_loss_alone() -> None:
    model = Pipeline(nn.Linear(2, 2), nn.Linear(2, 2))
    model.axis = DepthAxis([Range(0, 1), Range(1, 2)])
    with pytest.raises(TaskError, match=r"only Task.loss and Task.evaluate may call"):
        model(torch.ones(1, 2))
    with model.open(), pytest.raises(StageDone):
        model(torch.ones(1, 2))


def test_a_call_outside_of_a_loss_leaves_no_trace() -> None:
    model = Pipeline(nn.Linear(2, 3), nn.Linear(3, 2))
    model.axis = DepthAxis([Range(0, 2)])
    before = dict(vars(model))
    model(torch.ones(1, 2))
    assert vars(model) == before
    with model.open():
        model(torch.ones(1, 2))
    assert model.num_calls == 1


def test_a_block_may_begin_in_place() -> None:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ReLU(inplace=True)]
    plain, x = nn.Sequential(*copy.deepcopy(blocks)), torch.randn(5, 3)
    plain(x).sum().backward()
    whole = Pipeline(*copy.deepcopy(blocks))
    whole.axis = DepthAxis([Range(0, 4)])
    whole(x).sum().backward()
    meeting, ranges = Meeting(2), [Range(0, 1), Range(1, 4)]
    first, second = Pipeline(*copy.deepcopy(blocks)), Pipeline(*copy.deepcopy(blocks))
    for rank, model in enumerate((first, second)):
        model.axis = DepthAxis(ranges, ThreadTransport(meeting, rank))
    with first.open(), pytest.raises(StageDone) as done:
        first(x)
    done.value.send()
    with second.open():
        second(x).sum().backward()
    for name, wanted in plain.named_parameters():
        assert torch.equal(whole.get_parameter(name).grad, wanted.grad)
        if name != "0.weight" and name != "0.bias":
            assert torch.equal(second.get_parameter(name).grad, wanted.grad)
    [received] = second.inputs
    assert received.grad is not None
