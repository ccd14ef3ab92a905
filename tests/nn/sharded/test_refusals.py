"""What cannot be right in shards is refused when the model is cut or computed, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lockstep.errors import ConfigError, TaskError
from lockstep.nn import ShardedLogits, shard
from lockstep.nn.cutting import cut, keep
from lockstep.nn.holding import Holding
from lockstep.nn.sharded.regions import Region
from lockstep.parallel.axes import ShardAxis
from lockstep.parallel.layout import Range

Change = Callable[[Any, Any], Any]


class Net(nn.Module):
    """A region with a module in it that does what a test wants."""

    def __init__(self, between: Change = lambda module, x: F.gelu(x)) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.between = Between(between)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self.up(x)))


class Between(nn.Module):
    def __init__(self, compute: Change) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("means", torch.zeros(8))
        self.layer_norm, self.group_norm = nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.compute(self, x)


def cut_net(net: Net) -> Net:
    shard(net, {"up": "column", "down": "row"})
    cut(net, 2)
    return net


def nothing(*_: Any) -> None:
    pass


def old_weight_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda up: up.weight.register_hook(nothing), "up.weight has a hook on its gradient"),
        (
            lambda up: up.bias.register_post_accumulate_grad_hook(nothing),
            "up.bias has a hook on its gradient",
        ),
        (lambda up: up.register_full_backward_hook(nothing), "up has a backward hook"),
        (lambda up: up.register_full_backward_pre_hook(nothing), "up has a backward hook"),
        (old_weight_norm, "up.weight is no parameter but computed from others"),
        (lambda up: nn.utils.spectral_norm(up), "up.weight is no parameter"),
        (lambda up: prune.l1_unstructured(up, "weight", 0.5), "up.weight is no parameter"),
    ],
)
def test_a_layer_whose_parameters_other_code_counts_on(change: Any, words: str) -> None:
    net = Net()
    change(net.up)
    with pytest.raises(ConfigError, match=f"num_shards=2: {words}.*leave the layer out of the"):
        cut_net(net)


def test_a_parametrized_layer() -> None:
    before, after = Net(), shard(Net(), {"up": "column", "down": "row"})
    parametrizations.weight_norm(before.up)
    with pytest.raises(TaskError, match="shard: up is parametrized"):
        cut_net(before)
    parametrizations.weight_norm(after.up)
    with pytest.raises(ConfigError, match="num_shards=2: up: weight is parametrized"):
        cut(after, 2)


def test_a_backward_hook_of_a_module_in_a_region_and_of_one_around_it() -> None:
    inside, around = Net(), Net()
    inside.between.register_full_backward_hook(nothing)
    with pytest.raises(TaskError, match="between has a backward hook"):
        cut_net(inside)(torch.ones(2, 4))
    seen: list[int] = []
    around.register_full_backward_hook(lambda *_: seen.append(1))
    cut_net(around)(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_a_norm_over_features_in_a_region_is_named(name: str) -> None:
    net = cut_net(Net(lambda module, x: getattr(module, name)(x)))
    with pytest.raises(
        TaskError, match=rf"{name} in between.{name} \(.*Norm\) at test_refusals.py:\d+: does not"
    ):
        net(torch.ones(2, 4))


def updates_in_place(module: Any, x: Any) -> Any:
    module.mean.mul_(0.9).add_(0.1 * x.detach().mean())


def updates_by_features(module: Any, x: Any) -> Any:
    module.means += x.detach().mean(0)


def writes_out(module: Any, x: Any) -> Any:
    torch.mul(x.detach().mean(), 0.1, out=module.mean)


@pytest.mark.parametrize(
    ("compute", "buffer"),
    [
        (updates_in_place, "mean"),
        (updates_by_features, "means"),
        (writes_out, "mean"),
        (lambda module, x: module.batch_norm(x), "batch_norm.running_mean"),
    ],
)
def test_a_buffer_that_is_changed_by_features_in_shards(compute: Change, buffer: str) -> None:
    net = cut_net(Net(compute))
    with pytest.raises(TaskError, match=f"changes buffer between.{buffer} by features that are"):
        net(torch.ones(2, 4))
    assert float(net.between.mean) == 0.0


def test_a_result_that_is_no_tensor_and_differs() -> None:
    with pytest.raises(TaskError, match=r"item in between \(Between\) at .*: gives .* and .* for"):
        cut_net(Net(lambda module, x: x.sum().item()))(torch.ones(2, 4))
    with pytest.raises(TaskError, match="numpy in between"):
        cut_net(Net(lambda module, x: x.detach().numpy()))(torch.ones(2, 4))


def test_rows_of_a_tensor_in_shards() -> None:
    net, rows = Net(), Net(lambda module, x: torch.stack([F.gelu(row) for row in x]))
    rows.load_state_dict(net.state_dict())
    x = torch.randn(3, 4)
    torch.testing.assert_close(cut_net(net)(x), cut_net(rows)(x))


def test_the_parameter_of_a_cut_layer_says_what_has_become_of_it() -> None:
    net = cut_net(Net())
    with pytest.raises(TaskError, match=r"up\.weight: is cut into weight_0 to weight_1"):
        _ = net.up.weight
    assert not hasattr(net.up, "weight")
    with pytest.raises(AttributeError, match="no attribute 'width'"):
        _ = net.up.width
    assert "(up): ColumnLinear(weight=(8, 4), bias=(8,), num_shards=2)" in repr(net)


def test_a_whole_tensor_of_which_others_have_a_part_has_a_shape_only() -> None:
    net = cut_net(Net())
    keep(net, Holding((Range(0, 1),), Range(0, 1)))
    state = net.state_dict()
    weight = state["up.weight"]
    assert (weight.shape, weight.dtype, weight.numel()) == ((8, 4), torch.float32, 32)
    assert float(state["down.bias"].sum()) == float(net.down.bias.detach().sum())
    for use in (Tensor.sum, Tensor.clone, Tensor.detach, lambda t: t + 1, lambda t: t.data):
        with pytest.raises(TaskError, match=r"state_dict: up.weight lies on other ranks"):
            use(weight)


def logits(classes: int = 7) -> tuple[Tensor, ShardedLogits]:
    """Whole ones and those in shards, of the same values, by a layer that is cut."""
    torch.manual_seed(0)
    head = nn.ModuleDict({"head": nn.Linear(5, classes).double()})
    x = torch.randn(6, 5, dtype=torch.float64)
    whole = head["head"](x)
    cut(shard(head, {"head": "vocabulary"}), 3)
    return whole, head["head"](x)


TARGETS = torch.tensor([0, 2, 6, -100, 3, 4])
SCALE = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "compute",
    [
        lambda z: F.cross_entropy(z / 0.7, TARGETS),
        lambda z: F.cross_entropy(SCALE * z.float().double(), TARGETS),
        lambda z: F.cross_entropy(30 * torch.tanh(z / 30), TARGETS),
        lambda z: F.cross_entropy(z[..., :].view(-1, z.size(-1)), TARGETS),
        lambda z: F.cross_entropy(z[1:].reshape((-1, z.shape[-1])), TARGETS[1:]),
        lambda z: F.cross_entropy(z[TARGETS >= 0], TARGETS[TARGETS >= 0]),
        lambda z: F.nll_loss(F.log_softmax(z, -1), TARGETS),
        lambda z: F.nll_loss(z.log_softmax(dim=1), TARGETS, reduction="sum"),
        lambda z: F.nll_loss(torch.softmax(z, -1).log(), TARGETS),
        lambda z: z.softmax(-1).argmax(-1).sum() + F.cross_entropy(z, TARGETS),
    ],
)
def test_what_is_done_to_logits_in_shards_is_right(compute: Any) -> None:
    losses = [compute(z) for z in logits()]
    torch.testing.assert_close(losses[1], losses[0])
    gradients = []
    for number in (0, 1):
        z = logits()[number]
        loss = compute(z)
        leaves = z.parts if isinstance(z, ShardedLogits) else [z]
        gradients.append(torch.cat(torch.autograd.grad(loss, leaves), -1))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(
    "compute",
    [
        lambda z: z.topk(2),
        lambda z: z.max(-1),
        lambda z: z.sum(),
        lambda z: z[..., :3],
        lambda z: z[:, :2],
        lambda z: z[0, 0],
        lambda z: z.view(-1),
        lambda z: z.transpose(0, 1),
        lambda z: F.kl_div(z, torch.ones(6, 7), reduction="sum"),
        lambda z: F.cross_entropy(torch.ones(6, 7), z),
        lambda z: F.cross_entropy(z, TARGETS, size_average=False),
        lambda z: F.nll_loss(z, TARGETS, reduce=False),
        lambda z: F.log_softmax(z, 0),
        lambda z: torch.cat([z, z], -1),
    ],
)
def test_what_needs_all_logits_says_what_to_use(compute: Any) -> None:
    with pytest.raises(TaskError, match=r"logits\.whole\(\)"):
        compute(logits()[1])


def test_an_unknown_reduction_is_refused_as_torch_does() -> None:
    for z in logits():
        with pytest.raises(ValueError, match="meen is not a valid value for reduction"):
            F.cross_entropy(z, TARGETS, reduction="meen")


def test_an_axis_on_which_not_all_ranks_compute_is_closed() -> None:
    axis = ShardAxis(2)
    parts = [torch.ones(1), torch.ones(1)]
    axis.closed = "not now"
    for compute in (axis.total, axis.maximum, axis.all, Region(axis).gather):
        with pytest.raises(TaskError, match="not now"):
            compute(parts)
    axis.closed = ""
    assert axis.total(parts).tolist() == [2.0]
